"""Tiny checkpoints stored in few bits, packed value by value as other projects' tools pack them,
and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from test_families import family_folder
from tiny_checkpoint import hf_folder

FLOAT8 = jnp.dtype("float8_e4m3fn")
GROUP = 16
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # which neighbour each nibble of a word holds
Tensors = dict[str, np.ndarray]
Pack = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]  # [N, K] -> by suffix, what it means


def words(
    rows: np.ndarray, bits: int = 4, nibbles: tuple[int, ...] = tuple(range(8))
) -> np.ndarray:
    """int32 words of neighbours of a row."""
    each = 32 // bits
    out = np.zeros((rows.shape[0], rows.shape[1] // each), np.uint64)
    for i in range(each):
        column = nibbles[i] if bits == 4 else i
        out |= rows[:, column::each].astype(np.uint64) << np.uint64(bits * i)
    return out.astype(np.uint32).view(np.int32)


def rounded(weight: np.ndarray, group: np.ndarray, bits: int, symmetric: bool) -> Any:
    """Unsigned values [N, K], scales and zero points [N, groups], what they mean; `group` is of
    each column."""
    most, count = (1 << bits) - 1, group.max() + 1
    scales = np.zeros((len(weight), count), np.float16)
    zeros = np.full((len(weight), count), 1 << (bits - 1))
    values = np.zeros(weight.shape, np.int64)
    for g in range(count):
        part = weight[:, group == g].astype(np.float64)
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.abs(part).max(1)
            low = -high
        scales[:, g] = (high - low) / most
        if not symmetric:
            # From 1 on: version 1 of GPTQ's format has no zero point 0.
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g].astype(float)), 1, most)
        units = np.rint(part / scales[:, g, None].astype(float)) + zeros[:, g, None]
        values[:, group == g] = np.clip(units, 0, most)
    meant = (values - zeros[:, group]) * scales.astype(np.float64)[:, group]
    return values, scales, zeros, meant.astype(np.float32)


def in_order(columns: int, size: int = GROUP) -> np.ndarray:
    return np.arange(columns) // size


def awq(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    q, s, z, meant = rounded(weight, in_order(weight.shape[1]), 4, False)
    return {
        "qweight": words(q.T, nibbles=AWQ_NIBBLES),
        "qzeros": words(z.T, nibbles=AWQ_NIBBLES),
        "scales": np.ascontiguousarray(s.T),
    }, meant


def gptq(bits: int = 4, symmetric: bool = False, v2: bool = False, order: bool = False) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        group = in_order(weight.shape[1])
        if order:  # the same for all that read the same activations
            group = np.random.default_rng(weight.shape[1]).permutation(group)
        q, s, z, meant = rounded(weight, group, bits, symmetric)
        return {
            "qweight": np.ascontiguousarray(words(q, bits).T),
            "qzeros": words(z.T - (0 if v2 else 1), bits),
            "scales": np.ascontiguousarray(s.T),
            "g_idx": group.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),  # as its tools write it
        }, meant

    return pack


def compressed_int4(symmetric: bool = True, order: bool = False) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        group = in_order(weight.shape[1])
        if order:
            group = np.random.default_rng(weight.shape[1]).permutation(group)
        q, s, z, meant = rounded(weight, group, 4, symmetric)
        tensors = {
            "weight_packed": words(q),
            "weight_scale": s,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(z.T).T)
        if order:
            tensors["weight_g_idx"] = group.astype(np.int32)
        return tensors, meant

    return pack


def int8_rows(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(weight / scales).astype(np.int8)
    return {"weight": values, "weight_scale": scales}, values * scales


def int8_zeros(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    low, high = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scales = ((high - low) / 255).astype(np.float32)
    zeros = np.clip(np.rint(-128 - low / scales), -128, 127).astype(np.int8)
    values = np.clip(np.rint(weight / scales) + zeros, -128, 127).astype(np.int8)
    tensors = {"weight": values, "weight_scale": scales, "weight_zero_point": zeros}
    return tensors, (values.astype(np.float32) - zeros) * scales


def float8(rows: bool = False, static: bool = False) -> Pack:
    def pack(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
        scales = (np.abs(weight).max(1, keepdims=True) if rows else np.abs(weight).max()) / 448
        scales = np.asarray(scales, np.float32)
        values = (weight / scales).astype(FLOAT8)
        tensors = {"weight": values, "weight_scale": scales}
        if static:
            tensors["input_scale"] = np.asarray(0.01, np.float32)
        return tensors, values.astype(np.float32) * scales

    return pack


def float8_blocks(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    spread = np.ones((GROUP, GROUP), np.float32)
    height, width = -(-weight.shape[0] // GROUP), -(-weight.shape[1] // GROUP)
    scales = np.zeros((height, width), np.float32)
    for i, j in np.ndindex(height, width):
        part = weight[i * GROUP : (i + 1) * GROUP, j * GROUP : (j + 1) * GROUP]
        scales[i, j] = np.abs(part).max() / 448
    each = np.kron(scales, spread)[: weight.shape[0], : weight.shape[1]]
    values = (weight / each).astype(FLOAT8)
    return {"weight": values, "weight_scale_inv": scales}, values.astype(np.float32) * each


def is_projection(name: str) -> bool:
    return name.endswith("proj.weight")


def packed_folder(
    folder: Path,
    pack: Pack,
    config: dict[str, Any],
    family: str = "llama",
    chosen: Callable[[str], bool] = is_projection,
    change: Callable[[Tensors], object] = lambda held: None,
) -> Path:
    """A Hugging Face folder `packed` with a family's projections stored so, and beside it `plain`
    with the numbers that they stand for. `change` is made to the packed tensors."""
    for name in ("packed", "plain"):
        if family == "llama":
            hf_folder(folder / name)
        else:
            family_folder(folder / name, family)
    held = load_file(folder / "packed" / "model.safetensors")
    packed, meant = dict(held), dict(held)
    for name in filter(chosen, held):
        parts, meant[name] = pack(held[name].astype(np.float32))
        del packed[name]
        packed |= {f"{name.removesuffix('weight')}{suffix}": a for suffix, a in parts.items()}
    change(packed)
    save_file(packed, folder / "packed" / "model.safetensors")
    save_file(meant, folder / "plain" / "model.safetensors")
    settings = json.loads((folder / "packed" / "config.json").read_text())
    settings["quantization_config"] = config
    (folder / "packed" / "config.json").write_text(json.dumps(settings))
    return folder / "packed"


def gptq_config(
    bits: int = 4, symmetric: bool = False, v2: bool = False, order: bool = False
) -> Any:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric,
        "desc_act": order, "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip


AWQ_CONFIG = {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True
}  # fmt: skip


def compressed_config(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip


def int4_config(symmetric: bool = True, order: bool = False) -> Any:
    return compressed_config({
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP,
        "symmetric": symmetric, "actorder": "group" if order else None,
    })  # fmt: skip


CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT8_CHANNEL = CHANNEL | {"type": "float"}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}
EVERY = {  # by name: how it is packed, what the config says, the kind
    "awq": (awq, AWQ_CONFIG, "int4"),
    "gptq": (gptq(), gptq_config(), "int4"),
    "gptq v2": (gptq(v2=True), gptq_config(v2=True), "int4"),
    "gptq sym": (gptq(symmetric=True), gptq_config(symmetric=True), "int4"),
    "gptq act-order": (gptq(order=True), gptq_config(order=True), "int4"),
    "gptq 8 bits": (gptq(8, True), gptq_config(8, True), "int8"),
    "gptq 8 bits act-order": (gptq(8, True, order=True), gptq_config(8, True, order=True), "int8"),
    "int4": (compressed_int4(), int4_config(), "int4"),
    "int4 asym": (compressed_int4(False), int4_config(False), "int4"),
    "int4 act-order": (compressed_int4(order=True), int4_config(order=True), "int4"),
    "w8a16": (int8_rows, compressed_config(CHANNEL), "int8"),
    "w8a8": (int8_rows, compressed_config(CHANNEL, TOKENS), "w8a8"),
    "fp8 channel": (
        float8(True), compressed_config(FLOAT8_CHANNEL, TOKENS | {"type": "float"}), "w8a8-fp8"
    ),
    "fp8 static": (
        float8(static=True), FP8_CONFIG | {"activation_scheme": "static"}, "w8a8-fp8"
    ),
    "fp8": (float8(), FP8_CONFIG, "w8a8-fp8"),
    "fbgemm": (float8(True), {"quant_method": "fbgemm_fp8"}, "w8a8-fp8"),
    "fp8 blocks": (
        float8_blocks, FP8_CONFIG | {"weight_block_size": [GROUP, GROUP]}, "fp8-block"
    ),
}  # fmt: skip
MADE = {  # what no kind keeps
    "gptq 8 bits zeros": (gptq(8), gptq_config(8), "none"),
    "w8a16 zeros": (int8_zeros, compressed_config(CHANNEL | {"symmetric": False}), "none"),
}
