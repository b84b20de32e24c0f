"""XLA's side of a call of a kernel for CPUs (xla/ffi/api/c_api.h), so that tests choose when its
threads come and where its buffers lie."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

EXECUTE = 3
Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Base(ctypes.Structure):
    """What all structs of the interface begin with."""

    _fields_ = (("size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class NumThreads(Base):
    _fields_ = (("context", ctypes.c_void_p), ("threads", ctypes.POINTER(ctypes.c_int64)))


class Schedule(Base):
    _fields_ = (("context", ctypes.c_void_p), ("task", Task), ("data", ctypes.c_void_p))


class Destroy(Base):
    _fields_ = (("error", ctypes.c_void_p),)


def function(takes: type[Base], gives: type | None = ctypes.c_void_p) -> type:
    return ctypes.CFUNCTYPE(gives, ctypes.POINTER(takes))


class Api(Base):
    _fields_ = (
        ("version", ctypes.c_int64 * 3),
        ("internal", ctypes.c_void_p),
        ("before", ctypes.c_void_p * 2),
        ("destroy", function(Destroy, None)),
        ("between", ctypes.c_void_p * 8),
        ("schedule", function(Schedule)),
        ("num_threads", function(NumThreads)),
    )


class Buffer(Base):
    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dimensions", ctypes.POINTER(ctypes.c_int64)),
    )


class Buffers(Base):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("places", ctypes.POINTER(ctypes.POINTER(Buffer))),
    )


class Frame(Base):
    _fields_ = (
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("operands", Buffers),
        ("results", Buffers),
    )


def _buffers(arrays: Sequence[np.ndarray]) -> Buffers:
    places = []
    for array in arrays:
        dimensions = (ctypes.c_int64 * array.ndim)(*array.shape)
        places.append(ctypes.pointer(Buffer(0, None, 0, array.ctypes.data, array.ndim, dimensions)))
    return Buffers(0, None, len(places), None, (ctypes.POINTER(Buffer) * len(places))(*places))


class Threads:
    """XLA's pool of threads.

    Attributes:
        count: threads that it says it has; None: it fails to.
        takes: what becomes of a task; False: it is refused, and an error returned.
        errors: that were returned and not destroyed.
    """

    def __init__(
        self, count: int | None = 1, takes: Callable[[Task, int], bool] = lambda *_: False
    ):
        self.count, self.takes, self.errors = count, takes, 0
        self.api = Api()
        self.api.destroy = function(Destroy, None)(self._destroy)
        self.api.schedule = function(Schedule)(self._schedule)
        self.api.num_threads = function(NumThreads)(self._num_threads)

    def call(
        self, address: int, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
    ) -> int | None:
        """Call a kernel's handler as XLA does."""
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))(address)
        given = (_buffers(operands), _buffers(results))
        return handler(Frame(0, None, ctypes.pointer(self.api), None, EXECUTE, *given))

    def _failed(self) -> int:
        self.errors += 1
        return 1  # no address: nobody but its own interface may look at it

    def _destroy(self, arguments: Destroy) -> None:
        assert arguments.contents.error == 1
        self.errors -= 1

    def _num_threads(self, arguments: NumThreads) -> int | None:
        if self.count is None:
            return self._failed()
        arguments.contents.threads[0] = self.count
        return None

    def _schedule(self, arguments: Schedule) -> int | None:
        given = arguments.contents
        task = ctypes.cast(given.task, ctypes.c_void_p).value
        return None if self.takes(Task(task), given.data) else self._failed()


def address_of(monkeypatch: pytest.MonkeyPatch, register: Callable[[], object]) -> int:
    """Of the handler that `register` makes known to XLA, which does not get it."""
    capsules = []
    with monkeypatch.context() as patched:
        patched.setattr(
            jax.ffi, "register_ffi_target", lambda _, capsule, platform: capsules.append(capsule)
        )
        register()
    (capsule,) = capsules
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return pointer(capsule, None)


def at_an_edge(array: np.ndarray, end: bool) -> np.ndarray:
    """A copy that ends, or begins, where memory does that may be read or written."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for page in (start, start + mmap.PAGESIZE + size):
        assert protect(page, mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (size - array.nbytes if end else 0)
    copy = np.frombuffer(room, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    return copy
