"""A folder that appears when it is complete, or not at all.

It is written under a hidden name beside its own, `.NAME.<8 hex digits>.partial`, and renamed in the
end. What a process that was killed leaves is removed by the next one that writes the same folder:
whoever writes holds a lock on a file in it, which the system lets go of with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"


@contextlib.contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """The folder to write into, which becomes `path` when the context ends well.

    Raises FileExistsError if `path` exists by then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path)
    folder, lock = _new_folder(path)
    try:
        yield folder
        (folder / _LOCK).unlink()
        if path.exists():  # a rename would replace a folder that is empty
            raise FileExistsError(path)
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale(path: Path) -> None:
    """Remove what processes left that were killed while they wrote `path`."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    for folder in path.parent.iterdir():
        if ours.fullmatch(folder.name) and folder.is_dir():
            with contextlib.suppress(OSError):  # another's files, or gone meanwhile
                lock = _locked(folder, wait=False)
                try:
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _new_folder(path: Path) -> tuple[Path, int]:
    """A new folder and its lock. One that somebody takes for stale before it is locked is no loss:
    there is another name."""
    while True:
        folder = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        folder.mkdir()
        try:
            lock = _locked(folder, wait=True)
        except FileNotFoundError:
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), (folder / _LOCK).stat()):
                return folder, lock
        os.close(lock)


def _locked(folder: Path, wait: bool) -> int:
    """The descriptor of a folder's lock. Raises BlockingIOError if another has it and `wait` is
    false."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(lock)
        raise
    return lock
