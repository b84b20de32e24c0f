"""Element types of KV pages, and the names they are asked for by."""

from __future__ import annotations

PAGE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
PAGE_NAMES = ("float32", "bfloat16", "float16", "int8", "fp8")
AUTO = "auto"
_ALIASES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def page_dtype(name: str | None) -> str | None:
    """The dtype of that name; None for auto, which is that of activations.

    Raises ValueError naming those that there are.
    """
    if name is None or name == AUTO:
        return None
    dtype = _ALIASES.get(name, name)
    if dtype not in PAGE_DTYPES:
        known = ", ".join((AUTO, *PAGE_NAMES))
        raise ValueError(f"kv_dtype is {name!r}; choose one of {known}")
    return dtype


def in_8_bits(dtype: str) -> bool:
    """Whether pages of this dtype have a scale for every token and head."""
    return dtype in ("int8", "float8_e4m3fn")
