"""Model families by name. A new family is a new file and one line here."""

from __future__ import annotations

from types import ModuleType
from typing import cast

from jaxinfer.models import (
    arcee,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    falcon,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    mistral,
    mixtral,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from jaxinfer.models.base import Family

_MODULES: tuple[ModuleType, ...] = (
    arcee,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    falcon,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gptj,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
# By the `model_type` of their config.json, which is the file's name.
FAMILIES: dict[str, Family] = {
    module.__name__.rpartition(".")[2]: cast(Family, module) for module in _MODULES
}


def family_of(name: str) -> Family:
    """The family of that name. Raises ValueError naming the known ones."""
    if name not in FAMILIES:
        raise ValueError(f"model_type {name!r} is not supported; known: {', '.join(FAMILIES)}")
    return FAMILIES[name]
