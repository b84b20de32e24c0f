"""Reads an optimised, scheduled HLO module: what a device is handed, in which loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# What hands the device nothing itself: names for values, and frames around other operations.
SILENT = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "opt-barrier",
    "async-start",
    "async-update",
}
IN_PLACE = {"scatter", "dynamic-update-slice"}


@dataclass(frozen=True, slots=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)  # bf16, s32, f8e4m3fn; pred and token have none
        return math.prod(self.dims) * (int(digits.group()) if digits else 8) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]
    is_root: bool
    operands: tuple[str, ...]
    line: str

    def called(self, attribute: str) -> str | None:
        """The computation an attribute such as `calls`, `body` or `to_apply` names."""
        found = re.search(rf"\b{attribute}=%?([\w.-]+)", self.line)
        return found.group(1) if found else None

    @property
    def trip_count(self) -> int | None:
        """Turns of a while loop, when the compiler knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.line)
        return int(found.group(1)) if found else None

    @property
    def op_name(self) -> str:
        """The path of traced functions the instruction comes from."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found.group(1) if found else ""

    def __str__(self) -> str:
        return f"{self.name} = {' '.join(map(str, self.results))} {self.opcode}"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An instruction the device runs `times` a step; `loop`: the outermost one it is in."""

    instruction: Instruction
    times: int
    loop: Instruction | None


class Module:
    """Computations of a compiled program by name."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
            if header:
                current = self.computations.setdefault(header.group(2), [])
                self.entry = header.group(2) if header.group(1) else self.entry
            elif instruction := _parse(line):
                current.append(instruction)

    def scheduled(
        self, name: str = "", times: int = 1, loop: Instruction | None = None
    ) -> Iterator[Scheduled]:
        """Everything that runs, loops and branches included, fusions as one instruction.

        A loop whose turns are not known counts once.
        """
        for instruction in self.computations[name or self.entry]:
            yield Scheduled(instruction, times, loop)
            match instruction.opcode:
                case "while":
                    turns = instruction.trip_count or 1
                    yield from self.scheduled(
                        self._callee(instruction, "body"), times * turns, loop or instruction
                    )
                case "call":
                    yield from self.scheduled(self._callee(instruction, "to_apply"), times, loop)
                case "async-start":
                    yield from self.scheduled(self._callee(instruction, "calls"), times, loop)
                case "conditional":
                    for branch in _branches(instruction.line):
                        yield from self.scheduled(branch, times, loop)

    def updates_in_place(self, instruction: Instruction, index: int) -> bool:
        """Whether result `index` is an update of an operand rather than a new array."""
        if instruction.opcode in IN_PLACE or "output_to_operand_aliasing" in instruction.line:
            return True
        if instruction.opcode != "fusion":
            return False
        body = {i.name: i for i in self.computations[self._callee(instruction, "calls")]}
        result = next(i for i in body.values() if i.is_root)
        if result.opcode == "tuple":
            result = body[result.operands[index]]
        while result.opcode == "bitcast":
            result = body[result.operands[0]]
        return result.opcode in IN_PLACE

    def _callee(self, instruction: Instruction, attribute: str) -> str:
        name = instruction.called(attribute)
        if name is None:
            raise ValueError(f"no {attribute} in: {instruction.line}")
        return name


def _parse(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.-]+) = ", line)
    if not found:
        return None
    rest = line[found.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, arguments = rest.partition("(")
    inside = arguments[: _closing("(" + arguments, 0) - 1]
    return Instruction(
        name=found.group(2),
        opcode=opcode,
        results=tuple(
            Array(dtype, tuple(int(d) for d in dims.split(",") if d))
            for dtype, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
        ),
        is_root=found.group(1) is not None,
        operands=tuple(re.findall(r"%([\w.-]+)", inside)),
        line=line,
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:200]}")


def _branches(line: str) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", line)
    if listed:
        return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
