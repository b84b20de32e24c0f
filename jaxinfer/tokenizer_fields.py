"""What the fields of a tokenizer's JSON files may hold."""

from __future__ import annotations

from typing import Any

from jaxinfer.field_rules import FLAG, SETTINGS, TEXT, Rule, either, list_of

NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
_FLAGS_OF_TOKENS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_LARGEST_ID = (1 << 31) - 1


def _is_entry(value: Any) -> bool:
    """What is said of a token."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return all(FLAG.accepts(value.get(name, False)) for name in _FLAGS_OF_TOKENS)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or _is_entry(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_ID


_TOKEN = Rule("a token, or an object with its content and flags", _is_token)
_TOKENS = list_of(_TOKEN)
_NAMED = Rule(
    "tokens by name", lambda value: isinstance(value, dict) and all(map(_is_token, value.values()))
)
_RULES = {
    **dict.fromkeys(NAMED_TOKENS, _TOKEN),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), FLAG),
    "added_tokens_decoder": SETTINGS,
    "additional_special_tokens": _TOKENS,
    "extra_special_tokens": either(_TOKENS, _NAMED),
    "tokenizer_class": TEXT,
}
_NOTHING = Rule("nothing but a chat_template in this file", lambda value: False)
_ID = Rule(f"an id from 0 to {_LARGEST_ID}", _is_id)
_ENTRY = Rule("an object with a token's content and flags", _is_entry)


def check_tokenizer_config(config: dict[str, Any]) -> None:
    """Raise ValueError naming a field of tokenizer_config.json or special_tokens_map.json that
    cannot be used; null says that it is not set."""
    for name, rule in _RULES.items():
        rule.or_null().check(name, config.get(name))
    for i, entry in (config.get("added_tokens_decoder") or {}).items():
        _ID.check("an id in added_tokens_decoder", int(i) if i.isdecimal() else i)
        _ENTRY.check(f"added_tokens_decoder: {i}", entry)


def check_ids(ids: dict[str, Any]) -> None:
    """Raise ValueError naming a token, of those by name, whose id is none."""
    for token, i in ids.items():
        _ID.check(f"the id of {token!r}", i)


def check_processor(template: dict[str, Any]) -> None:
    """Raise ValueError naming what a chat_template.json has that is no chat template."""
    for name, value in template.items():
        (TEXT if name == "chat_template" else _NOTHING).check(name, value)
