"""Models that take pictures too, whose text part is a family here: that part alone is served.

Their config.json has the text part's settings under `text_config`, often without those that
transformers has defaults for, and some that hold for all parts beside it.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.models.hf_fields import HfConfig

# model_type of the whole -> that of its text part
PARTS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_CLASS = "ForConditionalGeneration"
_OF_ALL = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
_UNSAID: dict[str, dict[str, Any]] = {  # what published files leave out, as transformers has it
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "mistral3": {},
}
_BASES = {"gemma3": 1e6}  # of RoPE


def is_wrapped(hf: dict[str, Any]) -> bool:
    """Whether a config.json is that of a whole whose text part can be served."""
    return isinstance(hf, dict) and str(dict.get(hf, "model_type")) in PARTS


def text_settings(hf: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the text part; any other as it is.

    Raises ValueError for a whole of another class, or with a text part of another family.
    """
    if not is_wrapped(hf):
        return hf
    whole, settings = str(dict.get(hf, "model_type")), HfConfig(hf)
    classes = settings.get("architectures") or []
    if classes and not any(name.endswith(_CLASS) for name in classes):
        raise ValueError(
            f"architectures = {classes}: of {whole} models only ...{_CLASS} are served"
        )
    own = settings.settings("text_config")
    stated = own.get("model_type", PARTS[whole])
    if stated != PARTS[whole]:
        raise ValueError(
            f"text_config: model_type {stated!r} is not supported (only {PARTS[whole]!r})"
        )
    text: dict[str, Any] = {**_UNSAID[whole], **own, "model_type": stated}
    beside = {name: dict.get(hf, name) for name in _OF_ALL}
    text |= {name: value for name, value in beside.items() if value is not None}
    if whole in _BASES and not text.get("rope_parameters"):
        text.setdefault("rope_theta", _BASES[whole])
    text.pop("architectures", None)  # the part's own class, in some files
    return text
