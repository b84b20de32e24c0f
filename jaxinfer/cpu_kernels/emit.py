"""Writing LLVM IR for a CPU: llvmlite's builder, with loops, variables and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

BYTE, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER, VOID = ir.PointerType(), ir.VoidType()
NULL = ir.Constant(POINTER, None)
# What numbers are stored as; LLVM has no arithmetic of bfloat16 on most CPUs, and need not.
STORED = {
    "float32": F32,
    "bfloat16": ir.IntType(16),
    "float16": ir.HalfType(),
    "int8": I32,  # four at once
}
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}  # in bytes


def number(value: int) -> ir.Constant:
    """A constant i64."""
    return ir.Constant(I64, value)


class Emitter(ir.IRBuilder):
    """A function that is being written: the builder of its body, and `arguments`."""

    def __init__(
        self, module: ir.Module, name: str, takes: Sequence[ir.Type], gives: ir.Type = VOID
    ):
        self.emitted = ir.Function(module, ir.FunctionType(gives, takes), name)
        self.emitted.attributes.add("nounwind")
        entry, body = (self.emitted.append_basic_block(part) for part in ("entry", "body"))
        super().__init__(body)
        self._entry = ir.IRBuilder(entry)
        self._entry.position_before(self._entry.branch(body))

    @property
    def arguments(self) -> Sequence[ir.Value]:
        return self.emitted.args

    def variable(self, kind: ir.Type, count: int = 1) -> ir.Value:
        """Room for `count` values on the stack, which LLVM keeps in registers where it can."""
        place = self._entry.alloca(kind, count)
        place.type = POINTER
        return place

    def at(self, base: ir.Value, index: ir.Value | int, kind: ir.Type = F32) -> ir.Value:
        """The address of an element of an array of `kind`."""
        place = number(index) if isinstance(index, int) else index
        return self.gep(base, [place], source_etype=kind)

    def read(self, base: ir.Value, index: ir.Value | int, kind: ir.Type = F32) -> ir.Value:
        """An element of an array of `kind`."""
        return self.load(self.at(base, index, kind), typ=kind)

    def read_vector(
        self, base: ir.Value, index: ir.Value | int, lanes: int, dtype: str = "float32"
    ) -> ir.Value:
        """So many consecutive elements of an array of `dtype`, wherever they begin, as floats, or
        as they are if they are fours of integers."""
        kind, floats = STORED[dtype], ir.VectorType(F32, lanes)
        place = self.at(base, index, kind)
        stored = self.load(place, align=SIZES[dtype], typ=ir.VectorType(kind, lanes))
        if kind in (F32, I32):
            return stored
        if dtype == "float16":
            return self.fpext(stored, floats)
        whole = ir.VectorType(I32, lanes)  # bfloat16 is the upper half of a float
        upper = self.shl(self.zext(stored, whole), ir.Constant(whole, [16] * lanes))
        return self.bitcast(upper, floats)

    def write_vector(self, value: ir.Value, base: ir.Value, index: ir.Value | int) -> None:
        """Write consecutive elements of a float array."""
        self.store(value, self.at(base, index), align=4)

    def splat(self, scalar: ir.Value, lanes: int) -> ir.Value:
        """A vector of one scalar."""
        kind = ir.VectorType(scalar.type, lanes)
        first = self.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        lane_0 = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return self.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lane_0)

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        return self.intrinsic("llvm.fma", a.type, a, b, c)

    def add_fours(self, sums: ir.Value, above: ir.Value, signed: ir.Value) -> ir.Value:
        """sums + the products of four bytes each, those of `above` without a sign."""
        name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}"
        octets = ir.VectorType(BYTE, 4 * sums.type.count)
        takes = [sums.type, octets, octets]
        sides = [self.bitcast(side, octets) for side in (above, signed)]
        return self.call(self.external(name, sums.type, takes), [sums, *sides])

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger one; a if one is not a number."""
        return self.select(self.fcmp_ordered("<", a, b), b, a)

    def minimum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The smaller one; a if one is not a number."""
        return self.select(self.fcmp_ordered(">", a, b), b, a)

    def intrinsic(self, name: str, gives: ir.Type, *arguments: ir.Value) -> ir.Value:
        """The result of an LLVM intrinsic that is overloaded by the type of its first argument."""
        kind = arguments[0].type
        lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        scalar = kind.element if lanes else kind
        whole = f"{name}.{lanes}{'f32' if scalar == F32 else scalar}"
        return self.call(self.external(whole, gives, [a.type for a in arguments]), arguments)

    def external(self, name: str, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        """A function of the module or of the process."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(gives, takes), name)

    def fetch(self, address: ir.Value) -> None:
        """Ask for memory that will be read; any address will do."""
        how = [ir.Constant(I32, value) for value in (0, 2, 1)]  # to read, into the second cache
        takes = [POINTER, I32, I32, I32]
        self.call(self.external("llvm.prefetch.p0", VOID, takes), [address, *how])

    def call_one_of(
        self, functions: Sequence[ir.Function], index: ir.Value, arguments: Sequence[ir.Value]
    ) -> None:
        """Call the function at `index`, one of those there are."""
        after = self.append_basic_block("called")
        switch = self.switch(index, after)
        for i, function in enumerate(functions):
            case = self.append_basic_block(function.name)
            switch.add_case(number(i), case)
            self.position_at_end(case)
            self.call(function, arguments)
            self.branch(after)
        self.position_at_end(after)

    @contextmanager
    def as_long_as(self, holds: Callable[[], ir.Value]) -> Iterator[None]:
        """A loop that is run while a condition, which is written here, holds."""
        head, body, after = (self.append_basic_block(part) for part in ("head", "body", "after"))
        self.branch(head)
        self.position_at_end(head)
        self.cbranch(holds(), body, after)
        self.position_at_end(body)
        yield
        self.branch(head)
        self.position_at_end(after)

    @contextmanager
    def each(self, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        """A loop over start, start + step, … below stop."""
        counter = self.variable(I64)
        self.store(start, counter)
        with self.as_long_as(lambda: self.icmp_signed("<", self.load(counter, typ=I64), stop)):
            index = self.load(counter, typ=I64)
            yield index
            self.store(self.add(index, number(step)), counter)
