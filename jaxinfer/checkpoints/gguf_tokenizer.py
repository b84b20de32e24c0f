"""The tokenizer a GGUF file carries in its metadata.

`tokenizer.ggml.pre` names how a byte-level vocabulary cuts a text. A wrong one gives plausible ids
and a worse model, so only those known exactly are built (`gguf_pre_tokenizers`); others are refused
by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from jaxinfer.checkpoints.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from jaxinfer.field_rules import FLAG, TEXT, integer, list_of, number
from jaxinfer.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Added,
    SentencePieceModel,
    new_model,
)
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer_files import (
    TURN_ENDS,
    TURN_MARKS,
    add_tokens,
    byte_level_bpe,
    merge_of,
    sentencepiece_model,
    templates_entry,
)

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_SAMPLING = {  # GGUF's names of generation defaults, in generation_config.json's words
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_PREFIX = "general.sampling."
_IDS = integer(-(1 << 31), 1 << 32)  # whether they are tokens is said of each
_RULES = {
    "tokenizer.chat_template": TEXT,
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": list_of(TEXT),
    "tokenizer.ggml.merges": list_of(TEXT),
    "tokenizer.ggml.token_type": list_of(integer(0, 255)),
    "tokenizer.ggml.scores": list_of(number(-1e38, 1e38)),
    "tokenizer.ggml.precompiled_charsmap": list_of(integer(-128, 255)),
    "tokenizer.ggml.add_space_prefix": FLAG,
    "tokenizer.ggml.remove_extra_whitespaces": FLAG,
}
_RULES_BY_END = {"_token_id": _IDS, "_token": FLAG}


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise ValueError naming a key of the tokenizer with a value that it cannot have."""
    for key, value in metadata.items():
        ends = [rule for end, rule in _RULES_BY_END.items() if key.endswith(end)]
        rule = _RULES.get(key, ends[0] if ends else None)
        if rule is not None and key.startswith("tokenizer."):
            rule.check(f"metadata key {key}", value)


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata.

    Raises ValueError naming the key that is missing or has a value we cannot build exactly.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty")
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds the same token twice")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if model == "llama":
        metadata = _with_usual_ids(metadata, types)
    config = _config(metadata, tokens)
    generation = {
        _SAMPLING.get(key.removeprefix(_PREFIX), key): value
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }
    vocabulary: str | SentencePieceModel
    if model == "gpt2":
        vocabulary = _byte_level(metadata, tokens)
    elif model == "llama":
        vocabulary = _sentencepiece(metadata, tokens, config)
    else:
        raise ValueError(f"tokenizer.ggml.model = {model!r} is not supported (gpt2, llama)")
    return Tokenizer(vocabulary, config, _eos_ids(metadata, tokens), generation)


def _with_usual_ids(metadata: dict[str, Any], types: Sequence[int] | None) -> dict[str, Any]:
    """Where a SentencePiece vocabulary's begin and end are not named, they are 1 and 2."""
    usual = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    control = {key: i for key, i in usual.items() if types and list(types[i : i + 1]) == [CONTROL]}
    return control | metadata


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> str:
    """A tokenizer.json of a vocabulary with merges."""
    name = metadata.get("tokenizer.ggml.pre", "(absent)")
    if name not in PRE_TOKENIZERS:
        if name in ("(absent)", "default"):
            raise ValueError(
                f"tokenizer.ggml.pre = {name!r} does not say how the vocabulary cuts a text, which"
                " would give a worse model; convert the original again with a current converter"
            )
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported; known: {known}")
    pre = PRE_TOKENIZERS[name]
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing; a vocabulary without is not supported")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [merge_of(merge, vocab) for merge in merges]
    except ValueError as error:
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    raw = byte_level_bpe(
        vocab, pairs, pre.splits, composed=pre.composed, whole_words=pre.whole_words
    )
    add_tokens(raw, _added(metadata, tokens))
    _add_bos_eos(raw, metadata, tokens, pre)
    return raw.to_str()


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], config: dict[str, Any]
) -> SentencePieceModel:
    """The SentencePiece model that the metadata was taken from, as far as it says."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.scores is missing or not as long as the tokens")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"tokenizer.ggml.unknown_token_id = {unknown}, of {len(tokens)} tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [
        BYTE if _BYTE_PIECE.fullmatch(token) else NORMAL for token in tokens
    ]
    model, known = new_model(), set(tokens)
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types)):
        kind = UNKNOWN if i == unknown else CONTROL if kind == UNKNOWN else kind
        piece = token.replace(" ", SPACE) if kind == USER_DEFINED else token  # written as text
        model.pieces.add(piece=token if piece in known else piece, score=score, type=kind)
    model.trainer_spec.model_type = BPE
    model.trainer_spec.byte_fallback = BYTE in types
    model.trainer_spec.unk_id = unknown
    model.trainer_spec.unk_piece = tokens[unknown]
    spec = model.normalizer_spec
    spec.name = "identity"
    spec.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spec.remove_extra_whitespaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap", ())
    spec.precompiled_charsmap = bytes(byte & 0xFF for byte in charsmap)
    wanted = _around(metadata, tokens, bos=True)
    config |= {f"add_{name}_token": name in wanted for name in ("bos", "eos")}
    config["legacy"] = True  # the space before a text comes after every special token, as there
    return sentencepiece_model(model.SerializeToString(), config)


def _added(metadata: dict[str, Any], tokens: list[str]) -> list[Added]:
    """Control tokens are special, and so are those that mark turns, whatever the file calls them;
    other user-defined ones are found in any text, as intended."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    return [
        Added(i, token, special=kind != USER_DEFINED or token in TURN_MARKS)
        for i, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) or token in TURN_MARKS
    ]


def _around(metadata: dict[str, Any], tokens: list[str], bos: bool) -> dict[str, int]:
    """The begin and end tokens that go around a text; `bos` where the file does not say."""
    around = {"bos": bos, "eos": False}
    wanted: dict[str, int] = {}
    for name, default in around.items():
        stated = metadata.get(f"tokenizer.ggml.add_{name}_token")
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if stated is None and i is None:
            continue  # there is none to add
        if default if stated is None else stated:
            if i is None or not 0 <= i < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id = {i}, with {len(tokens)} tokens")
            wanted[name] = i
    return wanted


def _add_bos_eos(
    raw: RawTokenizer, metadata: dict[str, Any], tokens: list[str], pre: PreTokenizer
) -> None:
    """What the model expects around a prompt."""
    if wanted := _around(metadata, tokens, pre.bos):
        bos, eos = ([tokens[wanted[n]]] if n in wanted else [] for n in ("bos", "eos"))
        raw.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            special_tokens=[(tokens[i], i) for i in wanted.values()],
        )


def _config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the chat template and the names of special tokens."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    config: dict[str, Any] = {}
    for name, key in keys.items():
        i = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if i is not None and 0 <= i < len(tokens):
            config[f"{name}_token"] = tokens[i]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).lstrip(".") or "default": source
        for key, source in metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    if templates:
        config["chat_template"] = templates_entry(templates)
    return config


def _eos_ids(metadata: dict[str, Any], tokens: list[str]) -> tuple[int, ...]:
    """End of text, end of turn and end of message: those that the file names, and where it names
    no end of turn, those that the vocabulary has under a usual name."""
    stated = [metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    ids = [i for i in stated if i is not None]
    for i in ids:
        if not 0 <= i < len(tokens):
            raise ValueError(f"tokenizer.ggml: EOS id {i} is outside of the {len(tokens)} tokens")
    if stated[1] is None:
        ids_of = {token: i for i, token in enumerate(tokens)}
        ends = [name for name in TURN_ENDS if name in ids_of]
        if (
            "<|return|>" in ends and "<|call|>" in ends
        ):  # there <|end|> is the end of a message only
            ends = [name for name in ends if name != "<|end|>"]
        ids += [ids_of[name] for name in ends]
    return tuple(dict.fromkeys(ids))
