"""How a config.json says that its weights are stored, where that is not as plain numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from jaxinfer.field_rules import (
    FLAG,
    SETTINGS,
    TEXT,
    Rule,
    agreed,
    either,
    integer,
    list_of,
    one_of,
    shown,
)
from jaxinfer.quantization.kinds import Activations, Values

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4"]
READ = (
    "awq (4 bits), gptq (4 and 8 bits), compressed-tensors (int8, float8, int4), fp8, fbgemm_fp8, "
    "and mxfp4 of gpt_oss"
)
INSTEAD = f"{READ} are read; take one of those, the unquantised checkpoint or a GGUF file"
_DECODED_BY = {"mxfp4": ("gpt_oss",)}  # storage that families know the tensors of
_SIZE = integer(1, 1 << 30)
_COLUMNS = Rule("a number of columns, or -1 for all", either(_SIZE, one_of(-1)).accepts)
_NAMES = Rule("names of modules", list_of(TEXT).accepts, nullable=True)
_VALUES: dict[Any, Values] = {
    ("int", 8): "int8", ("int", 4): "int4", ("float", 8): "float8_e4m3fn"
}  # fmt: skip


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
    """What `quantization_config` says.

    Attributes:
        method: its `quant_method`.
        schemes: how modules are stored.
        ignored: modules that stay numbers.
        unused: what it asks for besides that is not done, in words.
    """

    method: Method
    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """Of a module that is stored in few bits: by its name, a pattern, or its class."""
        if any(_names(target, module) or _fits(target, module) for target in self.ignored):
            return None
        ways = (_names, _fits, lambda target, module: target == "Linear")
        found = (
            scheme
            for way in ways
            for scheme in self.schemes
            if any(way(target, module) for target in scheme.targets)
        )
        return next(found, None)


def _names(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _fits(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def hf_storage(hf: dict[str, Any]) -> HfStorage | None:
    """How weights are stored; None: as plain numbers.

    Raises ValueError for every way that is not read, naming the field.
    """
    stored = hf.get("quantization_config") or hf.get("compression_config")
    if not stored:
        return None
    _check("", stored, SETTINGS)
    method = _check("quant_method", stored.get("quant_method", "unknown"), TEXT)
    if method in _DECODED_BY and hf.get("model_type") in _DECODED_BY[method]:
        return HfStorage(method)
    if method not in _READERS:
        raise _problem(f"weights stored as {method!r} cannot be read; {INSTEAD}")
    return _READERS[method](dict(stored))


def _problem(text: str) -> ValueError:
    return ValueError(f"quantization_config: {text}")


def _check(name: str, value: Any, rule: Rule) -> Any:
    return rule.check(f"quantization_config: {name}" if name else "quantization_config", value)


def _require(stored: dict[str, Any], where: str = "", **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not `allowed`; the first is what its absence means."""
    for key, values in allowed.items():
        value = stored.get(key, values[0])
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            known = " or ".join(repr(v) for v in values if v is not None) or "null"
            raise _problem(f"{where}{key} = {shown(value)} is not supported (only {known}); "
                           f"{INSTEAD}")  # fmt: skip


def _group(stored: dict[str, Any], key: str) -> int:
    return max(_check(key, stored.get(key), _COLUMNS), 0)


def _modules(stored: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """Names of modules, or patterns of them. Raises ValueError for a broken one."""
    names = [name for key in keys for name in _check(key, stored.get(key), _NAMES) or []]
    for name in names:
        try:
            _fits(name, "")
        except re.error as error:
            raise _problem(f"{' or '.join(keys)}: {shown(name)} is no pattern: {error}") from error
    return tuple(names)


def _awq(stored: dict[str, Any]) -> HfStorage:
    forms = ("gemm", "GEMM", None)
    _require(stored, version=forms, format=forms, checkpoint_format=forms, zero_point=(True,))
    if stored.get("backend") == "llm-awq":  # another packing; the others are programs
        raise _problem(f"backend = 'llm-awq' is not supported; {INSTEAD}")
    _require(stored, bits=(4, None), w_bit=(4, None))
    size = "group_size" if "group_size" in stored else "q_group_size"
    scheme = Scheme("int4", _group(stored, size), symmetric=False)
    return HfStorage("awq", (scheme,), _modules(stored, "modules_to_not_convert"))


def _gptq(stored: dict[str, Any]) -> HfStorage:
    _require(stored, bits=(4, 8), desc_act=(False, True), sym=(True, False))
    forms = ("gptq", "gptq_v2", None)
    _require(stored, checkpoint_format=forms, format=forms, dynamic=(None, {}))
    _require(stored, pack_dtype=("int32", None), is_marlin_format=(False, None))
    given = {key: stored.get(key) for key in ("checkpoint_format", "format")}
    scheme = Scheme(
        "int4" if stored.get("bits", 4) == 4 else "int8",
        _group(stored, "group_size"),
        symmetric=stored.get("sym", True),
        order=stored.get("desc_act", False),
        less_one=agreed(given, "gptq") == "gptq",
    )
    return HfStorage("gptq", (scheme,))


def _fp8(stored: dict[str, Any]) -> HfStorage:
    _require(stored, fmt=("e4m3", None), activation_scheme=("dynamic", "static", None))
    _require(stored, expert_dtype=("fp8", None))
    sizes = _block(stored, "weight_block_size", "")
    if sizes is not None:
        # Of activations in groups of columns nothing is read: they stay as they are.
        _require(stored, activation_scheme=("dynamic", None))
    static = stored.get("activation_scheme") == "static"
    scheme = Scheme(
        "float8_e4m3fn",
        block=sizes,
        activations="float8_e4m3fn" if sizes is None else "as_given",
        static=static,
    )
    ignored = _modules(stored, "modules_to_not_convert", "ignored_layers")
    return HfStorage("fp8", (scheme,), ignored, _unused(static, stored))


def _fbgemm(stored: dict[str, Any]) -> HfStorage:
    scheme = Scheme("float8_e4m3fn", activations="float8_e4m3fn")
    ignored, bound = _modules(stored, "modules_to_not_convert"), stored.get("activation_scale_ub")
    unused = (
        () if bound is None else (f"activation_scale_ub {shown(bound)}: activations have no bound",)
    )
    return HfStorage("fbgemm_fp8", (scheme,), ignored, unused)


def _compressed(stored: dict[str, Any]) -> HfStorage:
    named = Rule("groups of modules by name", lambda value: isinstance(value, dict) and bool(value))
    groups = _check("config_groups", stored.get("config_groups"), named)
    sparse = _check("sparsity_config", stored.get("sparsity_config"), SETTINGS.or_null()) or {}
    _require(sparse, "sparsity_config: ", format=("dense",))
    _require(stored, transform_config=(None, {}))
    _require(stored, format=(None, *_FORMATS))
    schemes = tuple(_group_scheme(name, group) for name, group in groups.items())
    static = any(scheme.static for scheme in schemes)
    ignored = _modules(stored, "ignore")
    return HfStorage("compressed-tensors", schemes, ignored, _unused(static, stored))


_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"
)  # fmt: skip
_ARGUMENTS: dict[str, tuple[Rule, Any]] = {  # of weights and activations, and what absence means
    "num_bits": (_SIZE, 8),
    "type": (TEXT, "int"),
    "symmetric": (FLAG, True),
    "strategy": (one_of("tensor", "channel", "group", "block", "token").or_null(), None),
    "group_size": (_COLUMNS.or_null(), None),
    "block_structure": (list_of(_SIZE).or_null(), None),
    "actorder": (either(FLAG, one_of("group", "weight", "dynamic", "static")).or_null(), None),
    "dynamic": (either(FLAG, one_of("local")), False),
}


def _arguments(where: str, given: Any) -> dict[str, Any]:
    settings = _check(where, given, SETTINGS)
    return {
        key: _check(f"{where}: {key}", settings.get(key, default), rule)
        for key, (rule, default) in _ARGUMENTS.items()
    }


def _group_scheme(name: str, group: Any) -> Scheme:
    """One of compressed-tensors' `config_groups`."""
    where = f"config_groups: {name}"
    _require(_check(where, group, SETTINGS), f"{where}: ", format=(None, *_FORMATS))
    weights = _arguments(f"{where}: weights", group.get("weights"))
    way = (weights["type"], weights["num_bits"])
    strategy = weights["strategy"] or ("group" if weights["group_size"] else "channel")
    if way not in _VALUES or strategy == "token":
        raise _problem(f"{where}: weights: {way[1]} bits of {way[0]!r} by {strategy!r}; {INSTEAD}")
    block = _block(weights, "block_structure", f"{where}: weights: ")
    if strategy == "block" and block is None:
        raise _problem(f"{where}: weights: block_structure is missing")
    activations: Activations = "as_given"
    given = group.get("input_activations")
    inputs = _arguments(f"{where}: input_activations", given) if given else None
    if inputs is not None:
        values = _VALUES.get((inputs["type"], inputs["num_bits"]))
        if values != _VALUES[way] or values == "int4":
            raise _problem(
                f"{where}: input_activations of {inputs['num_bits']} bits of {inputs['type']!r} "
                f"are not supported for weights of {way[1]} of {way[0]!r}; {INSTEAD}"
            )
        activations = "as_given" if strategy == "block" else values  # type: ignore[assignment]
    return Scheme(
        _VALUES[way],
        _group(weights, "group_size") if strategy == "group" else 0,
        block if strategy == "block" else None,
        weights["symmetric"],
        weights["actorder"] in ("group", "dynamic", True),
        activations=activations,
        static=inputs is not None and inputs["dynamic"] is False,
        targets=_modules(group, "targets"),
    )


def _block(stored: dict[str, Any], key: str, where: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale."""
    two = Rule("[rows, columns] or null", lambda v: list_of(_SIZE).accepts(v) and len(v) == 2, True)
    found = _check(f"{where}{key}", stored.get(key), two)
    return None if found is None else (found[0], found[1])


def _unused(static: bool, stored: dict[str, Any]) -> tuple[str, ...]:
    """What a checkpoint asks for of activations and pages."""
    asked = []
    if static:
        asked.append("scales of activations in the checkpoint are not used: each token has one")
    if stored.get("kv_cache_scheme"):
        asked.append("kv_cache_scheme is not used: --kv-cache-dtype says what pages are in")
    return tuple(asked)


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
}
