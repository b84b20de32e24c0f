"""Models known by name: their config.json files, and how many parameters each is published with.

For planning and for checks that need a real model's shapes; no weights come with a name.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import model_config

_FILE = Path(__file__).with_name("known_models.json")


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """By name: `config`, as in config.json, and `parameters`, their number."""
    return json.loads(_FILE.read_text())


@functools.cache
def known_model(name: str) -> ModelConfig:
    """The model of that name. Raises ValueError naming those that are known."""
    models = known_models()
    if name not in models:
        raise ValueError(f"{name!r} is no known model; known: {', '.join(models)}")
    return model_config(models[name]["config"])
