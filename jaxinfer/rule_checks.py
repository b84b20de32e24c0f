"""Checks of the parameters that forbid tokens, and the rules that are made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from jaxinfer.request import MAX_BAD_WORD, MAX_BAD_WORDS, MAX_SOURCE, SamplingParams
from jaxinfer.structured import KINDS, StructuredOutput
from jaxinfer.token_rules import NothingAllowedError, SequenceRules, TokenRules
from jaxinfer.violations import Violations, check_token_ids


def check_rules(found: Violations, params: SamplingParams, vocab_size: int) -> None:
    """Require each of the parameters to be one that can be honoured."""
    found.integer("min_tokens", params.min_tokens, 0, None)
    if params.allowed_token_ids is not None:
        _check_allowed(found, params.allowed_token_ids, vocab_size)
    _check_bad_words(found, params.bad_words)
    if params.structured is not None:
        _check_structure(found, params.structured)


def token_rules(
    params: SamplingParams, end_ids: tuple[int, ...], bad_words: Sequence[tuple[int, ...]]
) -> TokenRules | None:
    """The rules of checked parameters, whose `bad_words` are given as token ids; None forbids
    nothing."""
    allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
    rules = TokenRules(end_ids, params.min_tokens, allowed, tuple(bad_words), params.structured)
    return None if rules == TokenRules(end_ids) else rules


def check_rules_agree(
    found: Violations, rules: TokenRules | None, max_new_tokens: int, vocab_size: int
) -> None:
    """Require some token to be allowed at the beginning, as far as that is known without a
    structure, and an end to be possible."""
    if rules is None:
        return
    if rules.min_tokens > max_new_tokens:
        found.add(
            "min_tokens",
            f"is {rules.min_tokens}; at most {max_new_tokens} tokens can come (max_new_tokens)",
        )
    if rules.structure is not None and not rules.end_ids:
        found.add(
            "structured",
            "needs a token that ends the output: leave ignore_eos out, or give stop_token_ids",
        )
    try:
        SequenceRules(dataclasses.replace(rules, structure=None), vocab_size).mask((), 0)
    except NothingAllowedError as error:
        field = "min_tokens" if rules.allowed is None else "allowed_token_ids"
        found.add(field, f"contradicts others: {error}")


def _check_allowed(found: Violations, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        found.add("allowed_token_ids", "is empty; name at least one token, or leave it out")
    elif len(ids) > vocab_size:
        found.add(
            "allowed_token_ids",
            f"has {len(ids)} entries; the model has {vocab_size} tokens",
        )
    else:
        check_token_ids(found, "allowed_token_ids", ids, vocab_size)


def _check_bad_words(found: Violations, words: Sequence[str]) -> None:
    if isinstance(words, str):
        found.add("bad_words", f"is {words!r}; give a tuple of strings")
        return
    if len(words) > MAX_BAD_WORDS:
        found.add("bad_words", f"has {len(words)} entries; at most {MAX_BAD_WORDS} are taken")
        return
    for position, word in enumerate(words):
        field = f"bad_words[{position}]"
        if not isinstance(word, str):
            found.add(field, f"is {word!r}; it must be a text")
        elif len(word) > MAX_BAD_WORD or not word.strip():
            found.add(
                field,
                f"has {len(word)} characters; it must have 1 to {MAX_BAD_WORD}, not all spaces",
            )
        elif not _is_text(word):
            found.add(field, "is no text: it has half of a surrogate pair")


def _check_structure(found: Violations, structure: StructuredOutput) -> None:
    if not isinstance(structure, StructuredOutput) or structure.kind not in KINDS:
        found.add("structured", f"is {structure!r:.80}; it must be a StructuredOutput")
        return
    kind, source = structure.kind, structure.source
    field = f"structured.{kind}"
    if not isinstance(source, str) or not _is_text(source):
        found.add(field, "is no text")
    elif len(source.encode()) > MAX_SOURCE:
        found.add(field, f"has {len(source.encode())} bytes; at most {MAX_SOURCE} are taken")
    elif not source.strip() and kind != "json_object":
        found.add(field, "is empty")
    elif kind == "grammar" and "%llguidance" in source:
        found.add(field, "sets options of llguidance, which are the server's")
    elif kind == "choice" and not _is_choice(source):
        found.add(field, "must be a list of at least one text")


def _is_choice(source: str) -> bool:
    try:
        texts = json.loads(source)
    except (ValueError, RecursionError):
        return False
    listed = isinstance(texts, list) and len(texts) > 0
    return listed and all(isinstance(text, str) and _is_text(text) for text in texts)


def _is_text(value: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in value)
