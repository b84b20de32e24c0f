"""The real demo model for tests that need one: downloaded and converted once a machine."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxinfer.demo import demo_checkpoint


@functools.cache
def demo_path() -> Path:
    """The demo model's Orbax folder. The first call on a machine downloads 93 MB."""
    return demo_checkpoint()
