"""The metadata of a GGUF file's architecture, read so that nothing it says is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.checkpoints.gguf_reader import GgufFile
from jaxinfer.checkpoints.gguf_rope import rope_parameters

HfConfig = dict[str, Any]
_MISSING = object()
_INFORMATIVE = {"tensor_data_layout", "rope.scaling.finetuned"}  # how the file came about
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that change nothing; of other keys: none at all
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
_NOTHING = (0, None, "", "none")


class Metadata:
    """The keys of a file's architecture, remembering which were read."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.arch = str(file.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def __call__(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `ARCH.key`. Raises ValueError naming it when it is missing."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is _MISSING:
            raise ValueError(f"metadata key {self.arch}.{key} is missing")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A float as the decimal number it was written as: 1e-05, not 9.999999747378752e-06."""
        value = self(key, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def one(self, key: str, default: Any = _MISSING) -> Any:
        """A number that some files repeat for each layer."""
        value = self(key, default)
        values = value if isinstance(value, list) else [value]
        if len(set(values)) != 1:
            raise ValueError(f"metadata key {self.arch}.{key} = {value}: layers differ")
        return values[0]

    def rope(self) -> HfConfig:
        """The file's `rope_parameters`. Raises ValueError for contradictory ones."""
        return rope_parameters(self.file, self.number)

    def check_all_read(self) -> None:
        """Raise ValueError naming a key that says something and that nobody asked for."""
        for name, value in self.file.metadata.items():
            if not name.startswith(self.arch + "."):
                continue
            key = name.removeprefix(self.arch + ".")
            said = any(value) if isinstance(value, list) else value
            understood = self._read | _INFORMATIVE
            if key not in understood and said not in _NEUTRAL.get(key, _NOTHING):
                raise ValueError(f"metadata key {name} = {value} is not supported")
