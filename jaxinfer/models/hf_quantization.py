"""How a config.json says that its weights are stored, where that is not as plain numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.field_rules import shown
from jaxinfer.quantization.kinds import Activations, Values

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4"]
READ = (
    "awq (4 bits), gptq (4 and 8 bits), compressed-tensors (int8, float8, int4), fp8, fbgemm_fp8, "
    "and mxfp4 of gpt_oss"
)
INSTEAD = f"{READ} are read; take one of those, the unquantised checkpoint or a GGUF file"
_DECODED_BY = {"mxfp4": ("gpt_oss",)}  # storage that families know the tensors of


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some modules are stored.

    Attributes:
        values: what an entry is.
        group: columns that share a scale; 0: all of them.
        block: rows and columns that share one, in place of groups.
        symmetric: there are no zero points, or they all mean the middle.
        order: columns may be sorted by group ("act-order").
        less_one: zero points are stored less one.
        activations: what the checkpoint has them rounded to.
        static: and that with a scale of its own for all tokens.
        targets: modules it is for: names, "re:" patterns, or the class Linear.
    """

    values: Values
    group: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True
    order: bool = False
    less_one: bool = False
    activations: Activations = "as_given"
    static: bool = False
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True, slots=True)
class HfStorage:
    """What `quantization_config` says; `ignored` are modules that stay numbers."""

    method: Method
    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """Of a module that is stored in few bits."""
        if any(_matches(target, module) for target in self.ignored):
            return None
        own = [s for s in self.schemes if any(_matches(t, module) for t in s.targets)]
        of_class = [s for s in self.schemes if "Linear" in s.targets]
        return next(iter([*own, *of_class]), None)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


def hf_storage(hf: dict[str, Any]) -> HfStorage | None:
    """How weights are stored; None: as plain numbers.

    Raises ValueError for every way that is not read, naming the field.
    """
    stored = hf.get("quantization_config")
    if not stored:
        return None
    if not isinstance(stored, Mapping):
        raise _problem(f"is {shown(stored)}, expected settings by name")
    method = stored.get("quant_method", "unknown")
    if method in _DECODED_BY and hf.get("model_type") in _DECODED_BY[method]:
        return HfStorage(method)
    if method not in _READERS:
        raise _problem(f"weights stored as {method!r} cannot be read; {INSTEAD}")
    return _READERS[method](dict(stored))


def _problem(text: str) -> ValueError:
    return ValueError(f"quantization_config: {text}")


def _require(stored: dict[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not `allowed`; the first is what its absence means."""
    for key, values in allowed.items():
        value = stored.get(key, values[0])
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            known = " or ".join(repr(v) for v in values if v is not None)
            raise _problem(f"{key} = {shown(value)} is not supported (only {known}); {INSTEAD}")


def _group(stored: dict[str, Any], key: str) -> int:
    size = stored.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise _problem(f"{key} = {shown(size)}, expected a number of columns, or -1 for all")
    return max(size, 0)


def _names(stored: dict[str, Any], *keys: str) -> tuple[str, ...]:
    names: list[str] = []
    for key in keys:
        given = stored.get(key) or []
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise _problem(f"{key} = {shown(given)}, expected names of modules")
        names += given
    return tuple(names)


def _awq(stored: dict[str, Any]) -> HfStorage:
    _require(stored, version=("gemm", "GEMM"), zero_point=(True,))
    bits = "bits" if "bits" in stored else "w_bit"
    _require({bits: stored.get(bits)}, **{bits: (4,)})
    size = "group_size" if "group_size" in stored else "q_group_size"
    scheme = Scheme("int4", _group(stored, size), symmetric=False)
    return HfStorage("awq", (scheme,), _names(stored, "modules_to_not_convert"))


def _gptq(stored: dict[str, Any]) -> HfStorage:
    _require(stored, bits=(4, 8), desc_act=(False, True), sym=(True, False))
    _require(stored, checkpoint_format=("gptq", "gptq_v2", None), dynamic=(None, {}))
    scheme = Scheme(
        "int4" if stored.get("bits", 4) == 4 else "int8",
        _group(stored, "group_size"),
        symmetric=stored.get("sym", True),
        order=stored.get("desc_act", False),
        less_one=stored.get("checkpoint_format") != "gptq_v2",
    )
    return HfStorage("gptq", (scheme,))


def _fp8(stored: dict[str, Any]) -> HfStorage:
    _require(stored, fmt=("e4m3", None), activation_scheme=("dynamic", "static", None))
    block = stored.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    if block is not None:
        if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
            raise _problem(f"weight_block_size = {shown(block)}, expected [rows, columns] or null")
        # Of activations in groups of columns nothing is read: they stay as they are.
        _require(stored, activation_scheme=("dynamic", None))
    scheme = Scheme(
        "float8_e4m3fn",
        block=(sizes[0], sizes[1]) if sizes else None,
        activations="as_given" if sizes else "float8_e4m3fn",
        static=stored.get("activation_scheme") == "static",
    )
    ignored = _names(stored, "modules_to_not_convert", "ignored_layers")
    return HfStorage("fp8", (scheme,), ignored)


def _fbgemm(stored: dict[str, Any]) -> HfStorage:
    scheme = Scheme("float8_e4m3fn", activations="float8_e4m3fn")
    return HfStorage("fbgemm_fp8", (scheme,), _names(stored, "modules_to_not_convert"))


def _compressed(stored: dict[str, Any]) -> HfStorage:
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _problem(f"config_groups = {shown(groups)}, expected groups of modules by name")
    sparse = (stored.get("sparsity_config") or {}).get("format", "dense")
    _require({"sparsity_config: format": sparse}, **{"sparsity_config: format": ("dense",)})
    schemes = tuple(_group_scheme(name, dict(group)) for name, group in groups.items())
    return HfStorage("compressed-tensors", schemes, _names(stored, "ignore"))


def _group_scheme(name: str, group: dict[str, Any]) -> Scheme:
    """One of compressed-tensors' `config_groups`."""
    weights, where = group.get("weights"), f"config_groups: {name}: weights"
    if not isinstance(weights, Mapping):
        raise _problem(f"{where} = {shown(weights)}, expected settings by name")
    way = (weights.get("type", "int"), weights.get("num_bits"))
    known: dict[Any, Values] = {
        ("int", 8): "int8", ("int", 4): "int4", ("float", 8): "float8_e4m3fn"
    }  # fmt: skip
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if way not in known or strategy not in ("tensor", "channel", "group", "block"):
        raise _problem(f"{where}: {way[1]} bits of {way[0]!r} by {strategy!r}; {INSTEAD}")
    block = weights.get("block_structure")
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2):
        raise _problem(f"{where}: block_structure = {shown(block)}, expected [rows, columns]")
    inputs: dict[str, Any] = group.get("input_activations") or {}
    activations: str = "as_given"
    if inputs:
        activations = known.get((inputs.get("type", "int"), inputs.get("num_bits")), "int4")
        if activations != known[way] or activations == "int4":
            raise _problem(
                f"config_groups: {name}: input_activations of {inputs.get('num_bits')} bits are "
                f"not supported for weights of {way[1]}; {INSTEAD}"
            )
    return Scheme(
        known[way],
        _group(dict(weights), "group_size") if strategy == "group" else 0,
        (block[0], block[1]) if strategy == "block" and block else None,
        bool(weights.get("symmetric", True)),
        weights.get("actorder") in ("group", True),
        activations="as_given" if strategy == "block" else activations,  # type: ignore[arg-type]
        static=bool(inputs) and inputs.get("dynamic", False) is False,
        targets=_names(group, "targets"),
    )


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
}
