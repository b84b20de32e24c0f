"""Where the project keeps files on a user's machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: $JAXINFER_CACHE, or the platform's user cache folder."""
    import platformdirs  # here: GPUs are checked where little is installed

    override = os.environ.get("JAXINFER_CACHE")
    return Path(override or platformdirs.user_cache_dir("jaxinfer")).expanduser()


def exists(path: Path) -> bool:
    """Whether there is something at a path; there is nothing where no file can be."""
    try:
        return path.exists()
    except OSError:
        return False
