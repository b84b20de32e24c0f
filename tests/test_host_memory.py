"""Weights in large pages of memory, on systems that have them and on those that do not."""

from __future__ import annotations

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import host_memory
from jaxinfer.host_memory import in_large_pages

BYTES = 16 << 20
SIZE = 2 << 20


@pytest.fixture
def array() -> jax.Array:
    return jnp.arange(BYTES // 4, dtype=jnp.int32)


def settings(folder: Path, size: object = SIZE, enabled: str = "always [madvise] never") -> Path:
    (folder / "hpage_pmd_size").write_text(str(size))
    (folder / "enabled").write_text(enabled)
    return folder


def asked(monkeypatch, folder: Path, result: int) -> list[tuple[int, int, int]]:
    """What a system is asked of memory, which always answers alike."""
    calls = list[tuple[int, int, int]]()

    def madvise(*call: int) -> int:
        calls.append(call)
        return result

    monkeypatch.setattr(host_memory, "_SETTINGS", folder)
    library = types.SimpleNamespace(madvise=madvise)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: library)
    return calls


def test_all_of_an_array_is_moved_block_by_block(monkeypatch, tmp_path, array):
    calls = asked(monkeypatch, settings(tmp_path), 0)
    moved = in_large_pages([array, jnp.zeros(9)])
    start, starts = array.unsafe_buffer_pointer(), sorted({call[0] for call in calls})
    assert starts[0] <= start and start + BYTES <= starts[-1] + SIZE
    assert starts == list(range(starts[0], starts[-1] + SIZE, SIZE))
    assert moved == SIZE * len(starts) and {call[1] for call in calls} == {SIZE}


def test_a_system_that_refuses_them_is_not_counted_on(monkeypatch, tmp_path, array):
    """As where a container's rules forbid it, or Linux is older than 6.1."""
    calls = asked(monkeypatch, settings(tmp_path), -1)
    assert in_large_pages([array]) == 0 and calls


@pytest.mark.parametrize(
    "found",
    [{"enabled": "always madvise [never]"}, {"size": 512 << 20}, {"size": "nonsense"}, None],
    ids=["never", "too_large", "unreadable", "absent"],
)
def test_a_system_without_them_is_asked_nothing(monkeypatch, tmp_path, array, found):
    folder = tmp_path / "absent" if found is None else settings(tmp_path, **found)
    calls = asked(monkeypatch, folder, 0)
    assert in_large_pages([array]) == 0 and not calls


def test_numbers_are_what_they_were(array):
    in_large_pages([array])
    np.testing.assert_array_equal(array, np.arange(BYTES // 4))
