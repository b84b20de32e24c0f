"""How a config.json says that its weights are stored, where that is not as plain numbers."""

from __future__ import annotations

from typing import Any

_DECODED_BY = {"mxfp4": ("gpt_oss",)}  # storage that families know the tensors of


def fp8_block(hf: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a float8 checkpoint; None: weights are plain numbers,
    or what the family itself makes numbers of.

    Raises ValueError for every other way of storing weights, naming what is not read.
    """
    stored = hf.get("quantization_config")
    if not stored:
        return None
    method = stored.get("quant_method", "unknown")
    if hf.get("model_type") in _DECODED_BY.get(method, ()):
        return None
    if method != "fp8":
        raise ValueError(
            f"quantization_config: weights stored as {method!r} cannot be read; take the "
            "unquantised checkpoint or a GGUF file"
        )
    # Of activations nothing is read: they stay in the dtype the model is served in.
    for key, known in (("fmt", ("e4m3", None)), ("activation_scheme", ("dynamic", None))):
        if stored.get(key) not in known:
            raise ValueError(
                f"quantization_config: {key} = {stored[key]!r} is not supported (only "
                f"{known[0]!r}); take the unquantised checkpoint"
            )
    block = stored.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"quantization_config: weight_block_size = {block!r}, expected [rows, columns]; other "
            "float8 checkpoints are not read"
        )
    return sizes[0], sizes[1]
