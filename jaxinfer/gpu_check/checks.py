"""Compiles one program and asserts what its executable must satisfy."""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.gpu_check.cases import Expectation, device_bytes
from jaxinfer.gpu_check.hlo import COLLECTIVES, SILENT, Instruction, Module, Scheduled
from jaxinfer.programs import COMPILER_OPTIONS, Lowerable

LAYER_SCOPE = re.compile(r"/layer(\d+)/")  # how the step names the layers of its operations
NUMBERS = ("bf16", "f16", "f32")  # what a weight is multiplied as where kernels do not
AROUND_LAYERS = 24  # launches of a decode step that belong to no layer, at most


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion: what was found, and the limit it is held against."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Figures:
    """The compiler's own figures. Bytes are of one device; launches are of one step, those of
    layers the most that a layer of that kind has. `weight_bytes` are those of the parameters that
    a step takes."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    temp_limit: int
    room_bytes: int
    weight_bytes: int
    launches: int
    layer_launches: dict[str, int]
    collectives: dict[str, int]


@dataclass(slots=True)
class Result:
    """A row of the table: CPU seconds to compile, figures, assertions; or the `error` instead."""

    program: str
    seconds: float = 0.0
    figures: Figures | None = None
    checks: list[Check] = field(default_factory=list)
    error: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        return cls(
            data["program"],
            data["seconds"],
            Figures(**data["figures"]) if data["figures"] else None,
            [Check(**check) for check in data["checks"]],
            data["error"],
        )


def examine(program: Lowerable, expect: Expectation, mesh: Mesh | None) -> Result:
    """Compile and check. Raises what the compiler raises."""
    start = _cpu_seconds()
    assert mesh is not None
    with jax.set_mesh(mesh):  # kernels are compiled for the device they find there
        lowered = program.lower()
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS["gpu"])
    seconds = _cpu_seconds() - start
    return Result(program.name, seconds, *assess(lowered, compiled, expect))


def _cpu_seconds() -> float:
    """Of this process and the assemblers it ran: other work on the machine does not count."""
    return sum(os.times()[:4])


def assess(lowered: Any, compiled: Any, expect: Expectation) -> tuple[Figures, list[Check]]:
    """The figures of a compiled program, and every assertion on them."""
    memory, module = compiled.memory_analysis(), Module(compiled.as_text())
    needed = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + expect.elsewhere
    )
    scheduled = list(module.scheduled())
    launches = [s for s in scheduled if _launches(s)]
    by_layer = _by_layer(launches, _for_several(module))
    collectives = _collectives(scheduled)
    figures = Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temp_limit=expect.temp_limit,
        room_bytes=expect.memory - needed,
        weight_bytes=device_bytes(expect.weights),
        launches=sum(s.times for s in launches),
        layer_launches={
            kind: max(by_layer[i] for i, own in enumerate(expect.layers) if own == kind)
            for kind in sorted(set(expect.layers))
        },
        collectives=dict(collectives),
    )
    return figures, [
        _aliased(figures, expect),
        _no_copies(module, scheduled, expect),
        _as_stored(figures, scheduled, expect),
        _at_most("temporaries", figures.temp_bytes, expect.temp_limit),
        _at_most("device memory", needed, expect.memory),
        _control_flow(scheduled),
        _expected_collectives(collectives, scheduled, expect),
        _few_launches(by_layer, expect),
        _layouts(lowered, compiled, expect),
    ]


def _aliased(figures: Figures, expect: Expectation) -> Check:
    """State is updated in place: the result takes no memory of its own."""
    updated = device_bytes(expect.updated)
    return Check(
        "state aliased",
        figures.alias_bytes >= updated,
        f"{_mib(figures.alias_bytes)} aliased of {_mib(updated)} of state to update",
    )


def _no_copies(module: Module, scheduled: list[Scheduled], expect: Expectation) -> Check:
    """Nothing makes an array of the size of a layer's pool, or of its scales, but updates of them
    in place."""
    made = [
        f"{s.instruction}"
        for s in scheduled
        for index, result in enumerate(s.instruction.results)
        if (result.nbytes >= expect.pool_array or result.nbytes == expect.scale_array)
        and s.instruction.opcode not in SILENT
        and not module.updates_in_place(s.instruction, index)
    ]
    return Check("no copy of pool size", not made, "; ".join(made[:3]) or "none")


def _as_stored(figures: Figures, scheduled: list[Scheduled], expect: Expectation) -> Check:
    """Weights are read in as many bytes as their kind takes, and none is made numbers of."""
    weights = figures.weight_bytes
    made = [
        f"{s.instruction}"
        for s in scheduled
        for result in s.instruction.results
        if s.instruction.opcode not in {*SILENT, "custom-call"}  # kernels make no such thing
        and result.dtype in NUMBERS
        and _is_one_of(expect.matrices, result.dims)
    ]
    detail = f"{_mib(weights)} of weights, {_mib(expect.weight_bytes)} by their shapes"
    right = weights == expect.weight_bytes and not made
    return Check("weights as stored", right, "; ".join([detail, *made[:3]]))


def _is_one_of(matrices: frozenset[tuple[int, int]], dims: tuple[int, ...]) -> bool:
    """Whether an array has as many rows and columns as one of them, however they are divided."""
    return any(
        math.prod(dims) == outputs * columns and outputs in itertools.accumulate(dims, operator.mul)
        for outputs, columns in matrices
    )


def _at_most(name: str, found: int, limit: int) -> Check:
    return Check(name, found <= limit, f"{_mib(found)} of {_mib(limit)}")


def _control_flow(scheduled: list[Scheduled]) -> Check:
    """The host must not have to read a condition from the device in the middle of a step."""
    decided = [
        s.instruction.name
        for s in scheduled
        if s.instruction.opcode == "conditional"
        or (s.instruction.opcode == "while" and s.instruction.trip_count is None)
    ]
    return Check(
        "no control flow decided on the device", not decided, ", ".join(decided[:3]) or "none"
    )


def _expected_collectives(
    found: Counter[str], scheduled: list[Scheduled], expect: Expectation
) -> Check:
    looped = any(s.loop for s in scheduled if _kind(s))
    detail = f"{_listed(found)}{' (in a loop)' if looped else ''}"
    if found != expect.collectives:
        detail += f", expected {_listed(expect.collectives)}"
    return Check("collectives", found == expect.collectives and not looped, detail)


def _few_launches(by_layer: Counter[int | None], expect: Expectation) -> Check:
    """No layer of a decode step hands the device too much, and nor does what is around them."""
    limits: dict[int | None, int] = {**dict(enumerate(expect.launches)), None: AROUND_LAYERS}
    if not expect.launches:
        return Check("launches", True, "no decode step")
    too_many = [
        f"{by_layer[i]} of {limit} in {'no layer' if i is None else f'layer {i}'}"
        for i, limit in limits.items()
        if by_layer[i] > limit
    ]
    return Check("launches", not too_many, "; ".join(too_many[:3]) or "within limits")


def _layouts(lowered: Any, compiled: Any, expect: Expectation) -> Check:
    """Results lie as the next program takes them."""
    wrong = [
        f"result{jax.tree_util.keystr(path)} is {got.spec}, expected {want.spec}"
        for (path, got), want, info in zip(
            jax.tree.leaves_with_path(compiled.output_shardings),
            jax.tree.leaves(expect.outputs),
            jax.tree.leaves(lowered.out_info),
            strict=True,
        )
        if not got.is_equivalent_to(want, len(info.shape))
    ]
    return Check("results as the next program takes them", not wrong, "; ".join(wrong) or "all")


def _launches(s: Scheduled) -> bool:
    return s.instruction.opcode not in SILENT and not s.instruction.opcode.endswith("-done")


def _by_layer(launches: list[Scheduled], shared: set[str]) -> Counter[int | None]:
    """Launches by the layer that they, or the loop they are in, come from; None: from none, or
    `shared` by several."""
    found: Counter[int | None] = Counter()
    for s in launches:
        own = _layer(s.instruction)
        layer = own if own is not None or s.loop is None else _layer(s.loop)
        found[None if s.instruction.name in shared else layer] += s.times
    return found


def _layer(instruction: Instruction) -> int | None:
    found = LAYER_SCOPE.search(instruction.op_name)
    return int(found[1]) if found else None


def _for_several(module: Module) -> set[str]:
    """Names of what is made once for several layers: it takes nothing that a layer made, and more
    than one reads it. The compiler names it after the first of them.
    """
    origins: dict[str, set[str]] = {}  # what hands the device something, behind other names for it
    layers: dict[str, int | None] = {}
    readers: dict[str, set[int]] = {}
    apart: set[str] = set()  # takes nothing that a layer made
    for instruction in module.computations[module.entry]:
        name = instruction.name
        taken = set[str]().union(*(origins.get(each, ()) for each in instruction.operands))
        if instruction.opcode in SILENT:
            origins[name] = taken
            continue
        origins[name], readers[name], layer = {name}, set(), _layer(instruction)
        layers[name] = layer
        if all(layers[source] is None for source in taken):
            apart.add(name)
        if layer is not None:
            for source in taken:
                readers[source].add(layer)
    return {name for name in apart if len(readers[name]) > 1}


def _kind(s: Scheduled) -> str | None:
    """Which collective an instruction starts, if any."""
    opcode = s.instruction.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES else None


def _collectives(scheduled: list[Scheduled]) -> Counter[str]:
    found: Counter[str] = Counter()
    for s in scheduled:
        if kind := _kind(s):
            found[kind] += s.times
    return found


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
