"""Checkpoints: load any known kind, convert to Orbax, inspect."""

from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.inspection import (
    CheckpointInfo,
    describe,
    inspect_checkpoint,
    tensor_table,
)
from jaxinfer.checkpoints.load import LoadedModel, load_model, resolve_model

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "LoadedModel",
    "convert",
    "describe",
    "inspect_checkpoint",
    "load_model",
    "resolve_model",
    "tensor_table",
]
