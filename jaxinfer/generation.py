"""What a checkpoint says about generating (generation_config.json), and what takes its place.

The fields that `SamplingParams` has are the defaults of requests that leave them unset. Fields that
we do not compute, such as beams, are named once at the start; they are never half followed.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.field_rules import FLAG, TEXT, Rule, either, integer, is_number, list_of, one_of
from jaxinfer.request import RequestError, SamplingParams, Violation
from jaxinfer.validation import EngineLimits, Violations, check_sampling

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"
_SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_new_tokens",
)  # fmt: skip
_ELSEWHERE = {"do_sample", "max_length", "stop_strings", "eos_token_id"}
# How transformers runs a model, and what says nothing about the tokens chosen.
_NOTHING_TO_DO = {
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "return_dict_in_generate", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "compile_config", "disable_compile", "prefill_chunk_size",
    "low_memory", "continuous_batching_config", "trust_remote_code", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "prompt_lookup_num_tokens", "use_mtp",
}  # fmt: skip
_INTEGERS = {
    "top_k", "max_new_tokens", "max_length", "min_length", "min_new_tokens", "num_beams",
    "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "max_cache_len", "prefill_chunk_size", "num_assistant_tokens",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind",
}  # fmt: skip
_NUMBERS = {
    "length_penalty", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "diversity_penalty", "encoder_repetition_penalty", "guidance_scale",
    "assistant_confidence_threshold",
}  # fmt: skip
_FLAGS = {
    "do_sample", "use_cache", "return_dict_in_generate", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "disable_compile", "low_memory",
    "is_assistant", "renormalize_logits", "remove_invalid_values", "token_healing", "use_mtp",
    "trust_remote_code", "_from_model_config",
}  # fmt: skip
_ID = integer(-(1 << 31), 1 << 31)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_INTEGERS, Rule("an integer", lambda value: type(value) is int)),
    **dict.fromkeys(_NUMBERS, Rule("a number", is_number)),
    **dict.fromkeys(_FLAGS, FLAG),
    "early_stopping": either(FLAG, one_of("never")),
    "stop_strings": either(TEXT, list_of(TEXT)),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        either(_ID, list_of(_ID)),
    ),
}
_OF_BEAMS = {"length_penalty", "early_stopping"}  # nothing without beams, which are named
_OFF: dict[str, float] = {  # values that switch a field off; None, False and empty ones always do
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "penalty_alpha": 0,
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "diversity_penalty": 0,
    "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "min_length": 0, "min_new_tokens": 0, "guidance_scale": 1, "general.sampling.mirostat": 0,
    "general.sampling.xtc_probability": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What requests get that leave fields unset.

    Attributes:
        fields: of `SamplingParams`, by name. `max_new_tokens` is cut to what fits, since it was
            not asked for.
        max_length: bound of prompt and output together, where `max_new_tokens` is not known.
        not_honoured: what else was stated, as `num_beams = 4`.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    not_honoured: tuple[str, ...] = ()

    @property
    def bounds_length(self) -> bool:
        """Whether they say how long an output may be."""
        return self.fields.get("max_new_tokens") is not None or self.max_length is not None

    def params(self) -> SamplingParams:
        """The defaults, and our own for the rest."""
        return SamplingParams(**self.fields)

    def complete(
        self, given: Mapping[str, Any], prompt_tokens: int, limits: EngineLimits
    ) -> SamplingParams:
        """The parameters of a request that sets the fields `given`; None is unset too.

        Raises RequestError for names that are no fields, and for a prompt that fills `max_length`.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        if unknown := sorted(given.keys() - known):
            raise RequestError([Violation(name, "is no sampling parameter") for name in unknown])
        fields = {**self.fields, **{k: v for k, v in given.items() if v is not None}}
        if given.get("max_new_tokens") is None:
            fields["max_new_tokens"] = self._length(prompt_tokens, limits)
        return SamplingParams(**fields)

    def _length(self, prompt_tokens: int, limits: EngineLimits) -> int | None:
        """The output limit of a request without one; None is as many as fit."""
        bound = self.fields.get("max_new_tokens")
        if bound is None and self.max_length is not None:
            bound = self.max_length - prompt_tokens
            if bound < 1:
                raise RequestError(
                    [
                        Violation(
                            "max_new_tokens",
                            f"is not set, and the {prompt_tokens} prompt tokens leave no room in"
                            f" the model's own max_length of {self.max_length}; set it",
                        )
                    ]
                )
        room = limits.max_tokens - prompt_tokens
        return None if bound is None or bound >= room else bound

    def describe(self) -> str:
        """The defaults in one line, "none" when there are none."""
        fields = {**self.fields, "max_length": self.max_length}
        return ", ".join(f"{k} {_shown(v)}" for k, v in fields.items() if v is not None) or "none"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint says about generating: the ids that end an output, and the defaults."""

    eos_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()


def sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults of a generation_config.json.

    Raises ValueError naming a field whose value could not be honoured as it stands.
    """
    stated = {k: _plain(k, v) for k, v in config.items() if v is not None}
    try:
        for name in stated.keys() & _RULES.keys() - set(_SAME_NAME):  # of which more is said below
            _RULES[name].check(name, stated[name])
    except ValueError as error:
        raise ValueError(_unusable(str(error))) from error
    fields = {name: stated[name] for name in _SAME_NAME if name in stated}
    if stated.get("do_sample") is False:
        fields["temperature"] = 0.0
    if stops := stated.get("stop_strings"):
        fields["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
    found = Violations()
    if max_length := stated.get("max_length"):
        found.integer("max_length", max_length, 1, None)
    vocabulary = EngineLimits(1 << 31, 1 << 31, 1, 1 << 31, 1, 1 << 31)
    check_sampling(found, SamplingParams(**fields), vocabulary, ())
    if found:
        raise ValueError(_unusable("; ".join(f"{v.field} {v.message}" for v in found)))
    return SamplingDefaults(fields, max_length, tuple(_not_honoured(stated)))


def _unusable(problems: str) -> str:
    return (
        f"{GENERATION_FILE}: {problems}; correct it, or leave it out with --generation-config none"
    )


def _plain(name: str, value: Any) -> Any:
    """A whole number written as 50.0 is one; a float32 is the decimal that it was."""
    if name in _INTEGERS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _not_honoured(stated: Mapping[str, Any]) -> list[str]:
    known = {*_SAME_NAME, *_ELSEWHERE, *_NOTHING_TO_DO, *_OF_BEAMS}
    return [
        f"{name} = {_shown(value)}"
        for name, value in stated.items()
        if name not in known
        and value not in (False, "", [], {})
        and not (isinstance(value, numbers.Real) and value == _OFF.get(name))
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What is put in place of what a checkpoint says about chats and generating.

    Attributes:
        chat_template: a template's source; None is the checkpoint's own.
        generation: a generation_config.json as a dict; None is the checkpoint's own.
        override: fields that win over those.
    """

    chat_template: str | None = None
    generation: Mapping[str, Any] | None = None
    override: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        chat_template: str | Path | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
    ) -> TextOptions:
        """From a template's file and from "auto" (the checkpoint's own), "none" or a folder with a
        generation_config.json. Raises ValueError naming a file that is missing or broken.
        """
        from jaxinfer.chat_template import read_chat_template  # Jinja is not for everybody

        template = None if chat_template is None else read_chat_template(chat_template)
        override = dict(override_generation_config or {})
        sampling_defaults(override)  # says what is wrong before a model is loaded
        own = None if str(generation_config) == "auto" else _read_generation(generation_config)
        return cls(template, own, override)

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The checkpoint's tokenizer with the chat template that was chosen."""
        if self.chat_template is None:
            return tokenizer
        return tokenizer.with_chat_template(self.chat_template)

    def defaults(self, tokenizer: Tokenizer) -> GenerationDefaults:
        """What is chosen for a checkpoint, whose own generation_config.json its tokenizer has.

        Raises ValueError as `sampling_defaults`, and for an end id outside of the vocabulary.
        """
        from jaxinfer.tokenizer import eos_token_ids

        own = tokenizer.generation if self.generation is None else self.generation
        config = {**own, **self.override}
        stated = eos_token_ids({**(self.generation or {}), **self.override})
        for i in stated:
            if not isinstance(i, int) or not 0 <= i < tokenizer.vocab_size:
                raise ValueError(
                    f"eos_token_id = {i!r} is not in the vocabulary of {tokenizer.vocab_size}"
                )
        return GenerationDefaults(stated or tokenizer.eos_ids, sampling_defaults(config))


def _read_generation(choice: str | Path) -> Mapping[str, Any]:
    """The dict that a choice of --generation-config stands for."""
    from jaxinfer.tokenizer_files import read_json

    if str(choice) == "none":
        return {}
    if str(choice) == "vllm":
        raise ValueError("--generation-config vllm: use none for this server's own defaults")
    folder = Path(choice).expanduser()
    file = folder if folder.is_file() else folder / GENERATION_FILE
    if not file.is_file():
        raise ValueError(
            f"--generation-config {choice}: {file} does not exist; give auto, none, or a folder"
            f" with {GENERATION_FILE}"
        )
    config = read_json(file)
    try:
        sampling_defaults(config)
    except ValueError as error:
        raise ValueError(str(error).replace(GENERATION_FILE, str(file), 1)) from error
    return config
