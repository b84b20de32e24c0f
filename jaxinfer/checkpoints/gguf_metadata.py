"""The metadata of a GGUF file's architecture, read so that nothing it says is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.checkpoints.gguf_reader import GgufFile
from jaxinfer.checkpoints.gguf_rope import rope_parameters
from jaxinfer.field_rules import FLAG, TEXT, Rule, either, integer, list_of, number, one_of
from jaxinfer.models.hf_fields import BASE, EPSILON, FACTOR

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


_COUNT, _SIZE = integer(0, 1 << 31), integer(1, 1 << 31)
_EACH = either(_SIZE, list_of(_COUNT))  # or a number for each layer
_FACTOR = either(FACTOR, one_of(0.0, 0))  # 0: none
_BY_RULE: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        _SIZE,
        (
            "attention.key_length", "attention.kv_lora_rank", "attention.value_length",
            "block_count", "context_length", "embedding_length", "expert_used_count",
            "rope.dimension_count", "vocab_size",
        ),
    ),
    (
        _COUNT,
        (
            "attention.key_length_mla", "attention.q_lora_rank", "attention.sliding_window",
            "attention.value_length_mla", "expert_count", "expert_gating_func",
            "expert_group_count", "expert_group_used_count", "expert_shared_count",
            "expert_shared_feed_forward_length", "leading_dense_block_count",
            "rope.scaling.original_context_length",
        ),
    ),
    (
        _EACH,
        (
            "attention.head_count", "attention.head_count_kv", "expert_feed_forward_length",
            "feed_forward_length",
        ),
    ),
    (either(_SIZE, list_of(FLAG), list_of(_COUNT)), ("attention.sliding_window_pattern",)),
    (EPSILON, ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")),
    (BASE, ("rope.freq_base", "rope.freq_base_swa")),
    (
        _FACTOR,
        (
            "attention.clamp_kqv", "attention.scale", "attn_logit_softcapping", "embedding_scale",
            "expert_weights_scale", "final_logit_softcapping", "logit_scale", "residual_scale",
            "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.yarn_beta_fast",
            "rope.scaling.yarn_beta_slow",
        ),
    ),
    (number(0, 1), ("rope.scaling.yarn_log_multiplier",)),
    (FLAG, ("expert_weights_norm", "rope.scaling.finetuned", "use_parallel_residual")),
    (TEXT, ("rope.scaling.type",)),
)  # fmt: skip
KEYS: dict[str, Rule] = {key: rule for rule, keys in _BY_RULE for key in keys}


class Metadata:
    """The keys of a file's architecture, remembering which were read."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.arch = str(file.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def __call__(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `ARCH.key`. Raises ValueError naming it when it is missing, or cannot be
        what it is."""
        self._read.add(key)
        name = f"{self.arch}.{key}"
        if name in self.file.metadata:
            return KEYS[key].check(f"metadata key {name}", self.file.metadata[name])
        if default is _MISSING:
            raise ValueError(f"metadata key {name} is missing")
        return default

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A float as the decimal number it was written as: 1e-05, not 9.999999747378752e-06."""
        value = self(key, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def one(self, key: str, default: Any = _MISSING) -> Any:
        """A number that some files repeat for each layer."""
        value = self(key, default)
        values = value if isinstance(value, list) else [value]
        if not values or any(each != values[0] for each in values):
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
