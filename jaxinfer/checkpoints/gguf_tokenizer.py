"""The tokenizer a GGUF file carries in its metadata, as a tokenizer.json.

`tokenizer.ggml.pre` names the pre-tokenizer. A wrong one gives plausible ids and a worse model, so
only those whose splits are known exactly are built; others are refused by name.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token_type
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(use_regex=False)]
    )


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


_PRE_TOKENIZERS = {
    "gpt2": lambda: _byte_level(use_regex=True),
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
    "llama-bpe": lambda: _split_by(_LLAMA3),
    "llama3": lambda: _split_by(_LLAMA3),
    "llama-v3": lambda: _split_by(_LLAMA3),
    "qwen2": lambda: _split_by(_QWEN2),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word in the vocabulary is not merged
_COMPOSED = {"qwen2"}  # text is put into Unicode NFC first


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
    if model == "gpt2":
        raw = _byte_level_bpe(metadata, tokens)
    elif model == "llama":
        raw = _sentencepiece_bpe(metadata, tokens)
    else:
        raise ValueError(f"tokenizer.ggml.model = {model!r} is not supported (gpt2, llama)")
    _add_added_tokens(raw, metadata, tokens)
    _add_bos_eos(raw, metadata, tokens)
    return Tokenizer(raw.to_str(), _config(metadata, tokens), _eos_ids(metadata, len(tokens)))


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> RawTokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "(absent)")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"tokenizer.ggml.pre = {pre!r} is not supported; known: {known}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(merge, vocab) for merge in merges]
    raw = RawTokenizer(models.BPE(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _COMPOSED:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    raw.decoder = decoders.ByteLevel()
    return raw


def _pair(merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ValueError(f"tokenizer.ggml.merges: {merge!r} is not a pair")
    if missing := [t for t in (left, right, left + right) if t not in vocab]:
        raise ValueError(f"tokenizer.ggml.merges: {merge!r} needs missing tokens {missing}")
    return left, right


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str]) -> RawTokenizer:
    """SentencePiece BPE keeps scores instead of merges: what makes a better piece comes first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError("tokenizer.ggml.scores is missing or not as long as the tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    merges: list[tuple[str, str]] = []
    for piece in sorted(
        (t for t, kind in zip(tokens, types) if kind in (_NORMAL, _USER_DEFINED)),
        key=lambda t: (-scores[vocab[t]], vocab[t]),
    ):
        pairs = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"tokenizer.ggml.unknown_token_id = {unknown}, of {len(tokens)} tokens")
    raw = RawTokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    raw.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return raw


def _add_added_tokens(raw: RawTokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens are special; user-defined ones are found in any text, as intended."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    for token, kind in zip(tokens, types):
        if kind in (_CONTROL, _UNKNOWN):
            raw.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            raw.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_bos_eos(raw: RawTokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """What the model expects around a prompt. SentencePiece models have a BOS unless denied."""
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    around = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", sentencepiece),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    wanted: dict[str, int] = {}
    for name in (name for name, on in around.items() if on):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is None or not 0 <= i < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name}_token_id = {i}, with {len(tokens)} tokens")
        wanted[name] = i
    if wanted:
        bos, eos = ([tokens[wanted[name]]] if name in wanted else [] for name in around)
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
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _eos_ids(metadata: dict[str, Any], count: int) -> tuple[int, ...]:
    """End of text, end of turn and end of message, those that the file has."""
    stated = (metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
    ids = tuple(i for i in stated if i is not None)
    for i in ids:
        if not 0 <= i < count:
            raise ValueError(f"tokenizer.ggml: EOS id {i} is outside of the {count} tokens")
    return ids
