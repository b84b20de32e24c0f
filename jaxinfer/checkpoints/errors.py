"""The one error every checkpoint defect becomes."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be served: names the file, the tensor, expected and found."""
