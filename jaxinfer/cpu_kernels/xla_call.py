"""Kernels as custom calls of XLA, whose items are computed by its own threads.

A kernel computes `items` independent pieces of its results. What XLA hands over, and the calls that
put work on its threads, are laid out by its C interface (xla/ffi/api/c_api.h, 64 bits), of which
this knows versions 0.4 and 0.5: those of jaxlib 0.11.2 to 0.12.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from llvmlite import ir

from jaxinfer.cpu_kernels.compiler import machine_code
from jaxinfer.cpu_kernels.emit import BYTE, I32, I64, NULL, POINTER, VOID, Emitter, number

KNOWN_VERSIONS = ((0, 4), (0, 5))
# The interface's functions: those that may fail give an error, which is theirs who called.
_FUNCTION = ir.FunctionType(POINTER, [POINTER]).as_pointer()
_DESTRUCTOR = ir.FunctionType(VOID, [POINTER]).as_pointer()
# Where fields begin, in bytes. Of a call:
_EXTENSION, _API, _CONTEXT, _STAGE, _OPERANDS, _RESULTS = 8, 16, 24, 32, 72, 112
_EXECUTE = 3  # the stage of a call that computes
# Of an extension that asks which version of the interface is spoken, and of the answer's place:
_EXTENSION_TYPE, _METADATA, _MAJOR, _MINOR, _TRAITS = 8, 24, 24, 28, 32
_ASKS_METADATA = 1
_DATA, _DIMENSIONS = 24, 40  # of a buffer
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 64, 136, 144  # of the interface's functions
# Of a job, in 8 bytes: the next item, those that are done, those that hold it, and of how many.
_NEXT, _DONE, _HOLDERS, _COUNT, _FIELDS = range(5)


class Buffer(NamedTuple):
    """An operand or a result inside a kernel: its address, and its dimensions as i64."""

    data: ir.Value
    shape: tuple[ir.Value, ...]


# compute(emitter, buffers, item): writes one item's part of the results
Compute = Callable[[Emitter, Sequence[Buffer], ir.Value], None]
# items(emitter, buffers) -> how many there are
Items = Callable[[Emitter, Sequence[Buffer]], ir.Value]
# register() -> the name by which XLA calls a kernel
Named = Callable[[], str]


@functools.cache
def speaks() -> bool:
    """Whether the interface of this jaxlib is one that is known here."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:  # a jaxlib that was packed without it
        return False
    found = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return tuple(map(int, found)) in KNOWN_VERSIONS


def once(make: Named) -> Named:
    """`make`, called a first time only, whichever threads ask at once: XLA takes a name once."""
    lock, made = threading.Lock(), list[str]()

    @functools.wraps(make)
    def get() -> str:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get


def register(
    name: str, module: ir.Module, ranks: Sequence[int], results: int, items: Items, compute: Compute
) -> None:
    """Make a kernel callable by `jax.ffi.ffi_call(name, …)` on CPUs.

    `ranks` are the dimensions of its operands and then of its `results` results.
    """
    worker = _worker(module, ranks, compute)
    _handler(module, ranks, results, items, worker)
    address = machine_code(module, "handler")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")


def _worker(module: ir.Module, ranks: Sequence[int], compute: Compute) -> ir.Function:
    """What a thread does with a job: items, as long as there are, and the last to leave frees it.

    A thread that comes late finds none, and touches nothing but the job.
    """
    e = Emitter(module, "worker", [POINTER])
    (job,) = e.arguments
    buffers = _fields(e, job, ranks)
    taken = e.variable(I64)

    def more() -> ir.Value:
        item = e.atomic_rmw("add", e.at(job, _NEXT, I64), number(1), "monotonic")
        e.store(item, taken)
        return e.icmp_signed("<", item, e.read(job, _COUNT, I64))

    with e.as_long_as(more):
        compute(e, buffers, e.load(taken, typ=I64))
        e.atomic_rmw("add", e.at(job, _DONE, I64), number(1), "release")
    _release(e, job)
    e.ret_void()
    return e.emitted


def _release(e: Emitter, job: ir.Value) -> None:
    holders = e.atomic_rmw("sub", e.at(job, _HOLDERS, I64), number(1), "acq_rel")
    with e.if_then(e.icmp_signed("==", holders, number(1))):
        e.call(e.external("free", VOID, [POINTER]), [job])


def _handler(
    module: ir.Module, ranks: Sequence[int], results: int, items: Items, worker: ir.Function
) -> None:
    """What XLA calls: a job of all items, put on other threads, and worked on by this one."""
    e = Emitter(module, "handler", [POINTER], POINTER)
    (call,) = e.arguments
    _answer_questions(e, call)
    buffers = []
    for i, rank in enumerate(ranks):
        place = i - (len(ranks) - results)
        array = _field(e, call, _RESULTS if place >= 0 else _OPERANDS)
        buffer = e.read(array, place if place >= 0 else i, POINTER)
        dimensions = _field(e, buffer, _DIMENSIONS)
        shape = tuple(e.read(dimensions, axis, I64) for axis in range(rank))
        buffers.append(Buffer(_field(e, buffer, _DATA), shape))
    count = items(e, buffers)
    size = 8 * (_FIELDS + sum(1 + rank for rank in ranks))
    job = e.call(e.external("malloc", POINTER, [I64]), [number(size)])
    api, context = _field(e, call, _API), _field(e, call, _CONTEXT)
    helpers = _helpers(e, api, context, count)
    # The caller holds the job twice: as a worker, and until all items are done.
    for place, value in ((_NEXT, number(0)), (_DONE, number(0)), (_COUNT, count)):
        e.store(value, e.at(job, place, I64))
    e.store(e.add(helpers, number(2)), e.at(job, _HOLDERS, I64))
    place = _FIELDS
    for buffer in buffers:
        for value in (buffer.data, *buffer.shape):
            e.store(value, e.at(job, place, I64))
            place += 1
    with e.each(number(0), helpers):
        failed = _fails(e, api, _SCHEDULE, (number(40), NULL, context, worker, job))
        with e.if_then(failed, likely=False):  # no threads there
            _release(e, job)
    e.call(worker, [job])
    _wait(e, job, count)
    _release(e, job)
    e.ret(NULL)


def _field(e: Emitter, base: ir.Value, offset: int, kind: ir.Type = POINTER) -> ir.Value:
    return e.load(e.at(base, offset, BYTE), typ=kind)


def _fails(e: Emitter, api: ir.Value, function: int, arguments: Sequence[ir.Value]) -> ir.Value:
    """Whether a function of the interface does."""
    error = e.call(_field(e, api, function, _FUNCTION), [_struct(e, arguments)])
    failed = e.icmp_unsigned("!=", error, NULL)
    with e.if_then(failed, likely=False):
        destroy = _field(e, api, _DESTROY_ERROR, _DESTRUCTOR)
        e.call(destroy, [_struct(e, (number(24), NULL, error))])
    return failed


def _answer_questions(e: Emitter, call: ir.Value) -> None:
    """Return from calls that compute nothing: which version is spoken, and other stages."""
    extension = _field(e, call, _EXTENSION)
    with e.if_then(e.icmp_unsigned("!=", extension, NULL), likely=False):
        asked = _field(e, extension, _EXTENSION_TYPE, I32)
        with e.if_then(e.icmp_signed("==", asked, ir.Constant(I32, _ASKS_METADATA))):
            metadata, (major, minor) = _field(e, extension, _METADATA), KNOWN_VERSIONS[0]
            for place, value in ((_MAJOR, major), (_MINOR, minor), (_TRAITS, 0)):
                e.store(ir.Constant(I32, value), e.at(metadata, place, BYTE))
            e.ret(NULL)
    stage = _field(e, call, _STAGE, I32)
    with e.if_then(e.icmp_signed("!=", stage, ir.Constant(I32, _EXECUTE)), likely=False):
        e.ret(NULL)


def _helpers(e: Emitter, api: ir.Value, context: ir.Value, count: ir.Value) -> ir.Value:
    """Other threads that there is work for."""
    threads = e.variable(I64)
    e.store(number(1), threads)
    _fails(e, api, _NUM_THREADS, (number(32), NULL, context, threads))  # then there are none
    most = [e.sub(e.load(threads, typ=I64), number(1)), e.sub(count, number(1))]
    fewer = e.select(e.icmp_signed("<", *most), *most)
    return e.select(e.icmp_signed("<", fewer, number(0)), number(0), fewer)


def _wait(e: Emitter, job: ir.Value, count: ir.Value) -> None:
    """Until items that other threads took are done, which they are working on."""

    def waiting() -> ir.Value:
        done = e.load_atomic(e.at(job, _DONE, I64), "acquire", 8, typ=I64)
        return e.icmp_signed("<", done, count)

    with e.as_long_as(waiting):
        e.call(e.external("sched_yield", I32, []), [])


def _fields(e: Emitter, job: ir.Value, ranks: Sequence[int]) -> list[Buffer]:
    """The buffers as a job has them."""
    buffers, place = [], _FIELDS
    for rank in ranks:
        shape = tuple(e.read(job, place + 1 + axis, I64) for axis in range(rank))
        buffers.append(Buffer(e.read(job, place, POINTER), shape))
        place += 1 + rank
    return buffers


def _struct(e: Emitter, fields: Sequence[ir.Value]) -> ir.Value:
    """A struct of fields of 8 bytes each, on the stack."""
    place = e.variable(I64, len(fields))
    for i, value in enumerate(fields):
        e.store(value, e.at(place, i, I64))
    return place
