"""The files a tokenizer is kept in, in the layouts that checkpoints have.

A folder holds one of
- tokenizer.json, of the `tokenizers` library;
- tokenizer.model, of SentencePiece;
- vocab.json and merges.txt, byte-level BPE as GPT-2 wrote it,

and beside it, all optional, tokenizer_config.json, special_tokens_map.json, added_tokens.json,
chat_template.jinja, additional_chat_templates/, chat_template.json (of a processor, read where the
others hold no template) and generation_config.json.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.json_files import read_object
from jaxinfer.sentencepiece_model import USER_DEFINED, Added, SentencePieceModel, parse_model
from jaxinfer.tokenizer_fields import (
    NAMED_TOKENS,
    check_ids,
    check_processor,
    check_tokenizer_config,
)

TOKENIZER_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_FILE = "chat_template.json"
GENERATION_FILE = "generation_config.json"
# Pieces of vocabularies that mark turns and ends, whatever type a file gives them.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>",
             "<|call|>", "<end_of_utterance>", "<EOT>", "[EOT]", "<turn|>")  # fmt: skip
TURN_MARKS = frozenset({
    *TURN_ENDS, "<|im_start|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|observation|>",
    "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|begin_of_text|>",
    "<|end_of_text|>", "<|endoftext|>", "<|turn>", "[INST]", "[/INST]",
    "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer_class -> (pattern of words, whether text is put into Unicode NFC first)
_BYTE_LEVEL = {"GPT2": (GPT2_WORDS, False), "Qwen2": (QWEN2_WORDS, True)}


class MissingTokenizerError(ValueError):
    """A folder has none of the files that a tokenizer is read from."""


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with what the files beside it say of added tokens and templates.

    Raises ValueError naming a broken file.
    """
    config: dict[str, Any] = {}
    for file in (folder / "special_tokens_map.json", folder / CONFIG_FILE):
        config |= _checked(file, check_tokenizer_config)
    decoder = dict(config.get("added_tokens_decoder") or {})
    known = {content(entry) for entry in decoder.values()}
    for token, i in _checked(folder / "added_tokens.json", check_ids).items():
        if token not in known:
            decoder[str(i)] = {"content": token, "special": token in TURN_MARKS}
    if decoder:
        config["added_tokens_decoder"] = decoder
    if templates := dict(_templates(folder)):
        config["chat_template"] = templates_entry(templates)
    elif not config.get("chat_template"):
        config |= _checked(folder / PROCESSOR_FILE, check_processor)
    return config


def templates_entry(templates: dict[str, str]) -> str | list[dict[str, str]]:
    """Named chat templates as tokenizer_config.json has them."""
    if templates.keys() == {"default"}:
        return templates["default"]
    return [{"name": name, "template": source} for name, source in templates.items()]


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of the chat templates that lie in files of their own."""
    if (file := folder / TEMPLATE_FILE).is_file():
        yield "default", _text(file)
    for file in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja")):
        yield file.stem, _text(file)


def read_vocabulary(folder: Path, config: dict[str, Any]) -> str | SentencePieceModel:
    """The text of a tokenizer.json, or a SentencePiece model, from whichever a folder holds.

    Raises ValueError naming the file that is missing or broken.
    """
    if (file := folder / TOKENIZER_FILE).is_file():
        return _text(file)
    if (file := folder / SENTENCEPIECE_FILE).is_file():
        return _naming(file, lambda: sentencepiece_model(file.read_bytes(), config))
    if (folder / VOCAB_FILE).is_file() and (merges := folder / MERGES_FILE).is_file():
        return _naming(merges, lambda: _byte_level(folder, config))
    if (file := folder / "tekken.json").is_file():
        raise MissingTokenizerError(
            f"{file}: is not read; save the model's fast tokenizer as {TOKENIZER_FILE}"
        )
    raise MissingTokenizerError(
        f"{folder / TOKENIZER_FILE}: missing, and so are {SENTENCEPIECE_FILE} and {VOCAB_FILE} with"
        f" {MERGES_FILE}; save the model's fast tokenizer as {TOKENIZER_FILE}"
    )


def _naming[T](file: Path, read: Callable[[], T]) -> T:
    """What `read` gives; its ValueErrors name the file."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _text(file: Path) -> str:
    return _naming(file, lambda: file.read_text("utf-8"))


def _checked(file: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The JSON object in a file, {} when it is absent. Raises ValueError as `check`, naming it."""
    data = read_json(file)
    _naming(file, lambda: check(data))
    return data


# -- SentencePiece -------------------------------------------------------------------------------


def sentencepiece_model(data: bytes, config: dict[str, Any]) -> SentencePieceModel:
    """A tokenizer.model with the tokens that tokenizer_config.json adds to it.

    A begin token goes before a text unless the config says otherwise, an end token after it only if
    it says so; `legacy` (default false) puts the model's space before a text after every special
    token too. Raises ValueError.
    """
    model = parse_model(data)
    ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
    added = {token.content: token for token in added_tokens(config, ids)}
    for i, piece in enumerate(model.pieces):
        if piece.type == USER_DEFINED and piece.piece in TURN_MARKS and piece.piece not in added:
            added[piece.piece] = Added(i, piece.piece, special=True)
    ids |= {token.content: token.id for token in added.values()}
    around = {}
    for name, default in (("bos", True), ("eos", False)):
        if (own := getattr(model.trainer_spec, f"{name}_piece")) in ids:
            config.setdefault(f"{name}_token", own)  # for chat templates, and as an end
        token = content(config.get(f"{name}_token"))
        wanted = config.get(f"add_{name}_token")
        if wanted and token not in ids:
            raise ValueError(f"add_{name}_token is set, and the vocabulary lacks {token!r}")
        if default if wanted is None else wanted:
            around[f"{name}_id"] = ids.get(token)
    return SentencePieceModel(
        model, tuple(added.values()), prefix_after_tokens=bool(config.get("legacy")), **around
    )


def added_tokens(
    config: dict[str, Any], ids: Mapping[str, int], known: Mapping[str, AddedToken] | None = None
) -> list[Added]:
    """The tokens a config adds to a vocabulary, and those of it that it calls special.

    `ids` is the vocabulary; `known` has the flags of tokens that are added to it already, which
    stand where the config does not speak of them. Raises ValueError for an entry that cannot be
    honoured.
    """
    named = [config.get(name) for name in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or ()
        named += value.values() if isinstance(value, dict) else value
    special = {content(entry): entry for entry in reversed(named) if content(entry)}
    known = known or {}
    found = {}
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        if not (token := entry["content"]):
            raise ValueError(f"added_tokens_decoder: {i}: the token's content is empty")
        found[token] = _added(int(i), token, entry, known.get(token), token in special)
    for token in sorted(special.keys() - found.keys()):
        if token in ids:
            entry = {} if token in known else special[token]
            found[token] = _added(ids[token], token, entry, known.get(token), True)
    return list(found.values())


def _added(i: int, token: str, entry: Any, known: AddedToken | None, special: bool) -> Added:
    """A token with the flags that an entry of a config states; for others those that it has."""
    stated = entry if isinstance(entry, dict) else {}
    special = special or stated.get("special", False) or (known is not None and known.special)
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    for flag, usual in flags.items():
        flags[flag] = stated.get(flag, usual if known is None else getattr(known, flag))
    return Added(i, token, special, **flags)


def add_stated(raw: RawTokenizer, config: dict[str, Any]) -> None:
    """Give a tokenizer.json the tokens that its config adds or calls special, and their flags, as
    transformers does. Raises ValueError if one would get another id than the config says."""
    known = {token.content: token for token in raw.get_added_tokens_decoder().values()}
    stated = added_tokens(config, raw.get_vocab(with_added_tokens=True), known)
    flags = operator.attrgetter("special", "single_word", "lstrip", "rstrip", "normalized")
    held = {token: flags(entry) for token, entry in known.items()}
    add_tokens(raw, [token for token in stated if flags(token) != held.get(token.content)])
    check_added_ids(raw, stated)


# -- byte-level BPE ------------------------------------------------------------------------------


def _byte_level(folder: Path, config: dict[str, Any]) -> str:
    """vocab.json and merges.txt as a tokenizer.json."""
    kind = kind_of(config) or "GPT2"
    if kind not in _BYTE_LEVEL:
        raise ValueError(
            f"tokenizer_class {config['tokenizer_class']} is not built from {VOCAB_FILE} and"
            f" {MERGES_FILE} (only {', '.join(_BYTE_LEVEL)} are);"
            f" save the model's fast tokenizer as {TOKENIZER_FILE}"
        )
    if config.get("add_prefix_space"):
        raise ValueError("add_prefix_space is not supported here; use the model's tokenizer.json")
    words, composed = _BYTE_LEVEL[kind]
    vocab = _checked(folder / VOCAB_FILE, check_ids)
    config.setdefault("eos_token", "<|endoftext|>")
    head, *lines = (folder / MERGES_FILE).read_text("utf-8").split("\n")
    if not head.startswith("#version"):
        lines = [head, *lines]
    merges = [merge_of(line, vocab) for line in lines if line.strip()]
    raw = byte_level_bpe(vocab, merges, [words], composed=composed)
    add_tokens(raw, added_tokens(config, vocab))
    put_around(raw, config, bos=False)
    return raw.to_str()


def merge_of(line: str, vocab: dict[str, int]) -> tuple[str, str]:
    """The pair a line names. Raises ValueError when it is none, or needs tokens `vocab` lacks."""
    left, space, right = line.strip("\r").partition(" ")
    if not space:
        raise ValueError(f"{line!r} is not a pair")
    if missing := [t for t in (left, right, left + right) if t not in vocab]:
        raise ValueError(f"{line!r} needs missing tokens {missing}")
    return left, right


def byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    splits: Iterable[str],
    *,
    composed: bool = False,
    whole_words: bool = False,
) -> RawTokenizer:
    """BPE on bytes. A text is cut by each of the patterns `splits` in turn; with `composed` it is
    put into Unicode NFC before, with `whole_words` a cut that is a token is not merged."""
    raw = RawTokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
    if composed:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return raw


def add_tokens(raw: RawTokenizer, added: Iterable[Added]) -> None:
    """Add tokens in the order of their ids. Raises ValueError if one would get another id."""
    in_order = sorted(added, key=lambda token: token.id)
    for special, run in itertools.groupby(in_order, key=lambda token: token.special):
        entries = [
            AddedToken(
                t.content,
                single_word=t.single_word,
                lstrip=t.lstrip,
                rstrip=t.rstrip,
                normalized=t.normalized,
                special=special,
            )
            for t in run
        ]  # each call takes a time that grows with all tokens added so far
        (raw.add_special_tokens if special else raw.add_tokens)(entries)
    check_added_ids(raw, in_order)


def check_added_ids(raw: RawTokenizer, added: Iterable[Added]) -> None:
    """Raise ValueError if an added token has another id than it should."""
    for token in added:
        if (got := raw.token_to_id(token.content)) != token.id:
            raise ValueError(f"the added token {token.content!r} has the id {token.id}, not {got}")


def config_decides(config: dict[str, Any]) -> bool:
    """Whether the config, and not the tokenizer.json, says what surrounds a text.

    So it is for some of transformers' classes. DeepSeek's tokenizer.json counts on it.
    """
    return kind_of(config) in ("Llama", "CodeLlama", "Gemma", "Cohere")


def kind_of(config: dict[str, Any]) -> str:
    """transformers' class of a tokenizer, without what all names end in."""
    return str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")


def put_around(raw: RawTokenizer, config: dict[str, Any], bos: bool) -> None:
    """Put the begin and end tokens around a text that a config asks for, and no others; nothing
    changes without a word on either. `bos` is for when it speaks of the end alone. Raises
    ValueError for one that the vocabulary lacks."""
    stated = {name: config.get(f"add_{name}_token") for name in ("bos", "eos")}
    if all(value is None for value in stated.values()):
        return
    ids: dict[str, int] = {}
    for name, wanted in stated.items():
        token = content(config.get(f"{name}_token"))
        if (bos and name == "bos" if wanted is None else wanted) and token is not None:
            if (found := raw.token_to_id(token)) is None:
                raise ValueError(f"add_{name}_token is set, and the vocabulary lacks {token!r}")
            ids[name] = found
    names = {name: raw.id_to_token(i) for name, i in ids.items()}
    before, after = ([names[name]] if name in names else [] for name in ("bos", "eos"))
    raw.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=list({names[name]: i for name, i in ids.items()}.items()),
    )


# -- JSON ----------------------------------------------------------------------------------------


def content(token: Any) -> Any:
    """A token named in a config: a string, or a dict that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when the file is absent. Raises ValueError naming a broken file."""
    return read_object(path) if path.is_file() else {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), "utf-8")
