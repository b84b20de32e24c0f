"""Checkpoints: load any known kind, convert to Orbax, inspect."""

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.load import (
    GenerationDefaults,
    LoadedModel,
    convert,
    load_model,
    resolve_model,
)

__all__ = [
    "CheckpointError",
    "GenerationDefaults",
    "LoadedModel",
    "convert",
    "load_model",
    "resolve_model",
]
