"""Generation defaults: what is read of generation_config.json, and which requests get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import EOS, ScriptedEngine, byte_tokenizer, echo, limits
from jaxinfer_service import wire
from jaxinfer_service.model import OpenedModel
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from serving import in_loop, refused, serving_model
from test_cli import TINY, run, words
from test_tokenizer_gguf import byte_level
from tiny_checkpoint import hf_folder

from jaxinfer import LLM
from jaxinfer.checkpoints import CheckpointError, convert, inspect_checkpoint, load_model
from jaxinfer.checkpoints.gguf_tokenizer import build_tokenizer
from jaxinfer.engine_thread import EngineThread
from jaxinfer.generation import (
    GenerationDefaults,
    SamplingDefaults,
    TextOptions,
    sampling_defaults,
)
from jaxinfer.llm import _log_defaults
from jaxinfer.request import RequestError, SamplingParams
from jaxinfer.text import TextProcessor

QWEN = {  # the fields that published files have
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "repetition_penalty": 1.05, "transformers_version": "4.51.0", "_from_model_config": True,
}  # fmt: skip
LIMITS = limits(max_model_len=64, kv_tokens=64)


# -- what is read ----------------------------------------------------------------------------------


def test_what_published_files_say() -> None:
    defaults = sampling_defaults(QWEN)
    assert defaults.fields == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert defaults.not_honoured == () and defaults.max_length is None
    assert defaults.describe() == "temperature 0.6, top_k 20, top_p 0.95, repetition_penalty 1.05"
    assert sampling_defaults({}).params() == SamplingParams()
    assert sampling_defaults({"temperature": None}).describe() == "none"


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.0, "top_p": 0.9},
        ),
        ({"do_sample": True}, {}),
        ({"do_sample": None, "min_p": 0.05}, {"min_p": 0.05}),
        ({"max_new_tokens": 2048}, {"max_new_tokens": 2048}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"stop_strings": "END"}, {"stop": ("END",)}),
        ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"num_beams": 1, "length_penalty": 1.0, "typical_p": 1.0, "bad_words_ids": None}, {}),
    ],
)
def test_fields(config: dict[str, Any], fields: dict[str, Any]) -> None:
    defaults = sampling_defaults(config)
    assert defaults.fields == fields and not defaults.not_honoured


def test_what_is_not_honoured_is_named() -> None:
    config = {"num_beams": 4, "penalty_alpha": 0.6, "no_repeat_ngram_size": 3, "new_field": "x"}
    assert sampling_defaults(config).not_honoured == (
        "num_beams = 4", "penalty_alpha = 0.6", "no_repeat_ngram_size = 3", 'new_field = "x"',
    )  # fmt: skip
    off = {"num_beams": 1, "penalty_alpha": 0, "no_repeat_ngram_size": 0, "new_field": False}
    assert sampling_defaults(off).not_honoured == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be at least 0"),
        ({"temperature": "hot", "top_p": 2}, "temperature is 'hot'.*; top_p is 2"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_length": -5}, "max_length is -5"),
    ],
)
def test_values_that_no_request_could_have_are_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"generation_config.json: {message}.*config none"):
        sampling_defaults(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": "false"}, "do_sample = 'false', expected true or false"),
        ({"do_sample": 0}, "do_sample = 0, expected true or false"),
        ({"use_cache": "yes"}, "use_cache = 'yes', expected true or false"),
        ({"num_beams": "4"}, "num_beams = '4', expected an integer"),
        ({"max_length": 12.5}, "max_length = 12.5, expected an integer"),
        ({"typical_p": [0.9]}, r"typical_p = \[0.9\], expected a number"),
        ({"early_stopping": "always"}, "early_stopping = 'always', expected true or false or 'nev"),
        ({"stop_strings": [1]}, r"stop_strings = \[1\], expected a text or a list"),
        ({"pad_token_id": "0"}, "pad_token_id = '0', expected an integer"),
    ],
)
def test_values_of_another_kind_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"generation_config.json: {message}.*config none"):
        sampling_defaults(config)
    sampling_defaults(dict.fromkeys(config))  # null is not set


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert sampling_defaults({"num_beams": 1.0, "max_length": 20.0}).max_length == 20


# -- who gets it -----------------------------------------------------------------------------------


def test_a_field_that_is_set_wins() -> None:
    defaults = sampling_defaults(QWEN | {"max_new_tokens": 5, "stop_strings": "END"})
    unset = defaults.complete({}, 10, LIMITS)
    assert unset == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_new_tokens=5,
        stop=("END",),
    )  # fmt: skip
    given = {"temperature": 0.0, "top_k": 0, "max_new_tokens": 50, "stop": ("x",), "seed": 3}
    assert defaults.complete(given, 10, LIMITS) == SamplingParams(
        temperature=0.0, top_k=0, top_p=0.95, repetition_penalty=1.05, max_new_tokens=50,
        stop=("x",), seed=3,
    )  # fmt: skip
    assert defaults.complete({"temperature": None}, 1, LIMITS).temperature == 0.6
    with pytest.raises(RequestError, match="heat: is no sampling parameter"):
        defaults.complete({"heat": 1}, 1, LIMITS)


@pytest.mark.parametrize(
    ("config", "prompt_tokens", "limit"),
    [
        ({}, 10, None),
        ({"max_new_tokens": 5}, 10, 5),
        ({"max_new_tokens": 500}, 10, None),  # nobody asked for it: as many as fit
        ({"max_length": 20}, 10, 10),
        ({"max_length": 4096}, 10, None),
        ({"max_length": 20, "max_new_tokens": 5}, 18, 5),  # as in transformers
    ],
)
def test_lengths_that_nobody_asked_for_are_cut(
    config: dict[str, Any], prompt_tokens: int, limit: int | None
) -> None:
    defaults = sampling_defaults(config)
    assert defaults.complete({}, prompt_tokens, LIMITS).max_new_tokens == limit
    assert defaults.complete({"max_new_tokens": 7}, prompt_tokens, LIMITS).max_new_tokens == 7


def test_a_prompt_that_fills_the_models_own_length() -> None:
    defaults = sampling_defaults({"max_length": 20})
    with pytest.raises(RequestError, match=r"20 prompt tokens .* max_length of 20"):
        defaults.complete({}, 20, LIMITS)


def test_the_wire_tells_unset_from_set() -> None:
    assert wire.params_of(pb.Sampling()) == {}
    zero = pb.Sampling(temperature=0, top_k=0, ignore_eos=False, stop=["x"], logit_bias={3: 1.0})
    assert wire.params_of(zero) == {
        "temperature": 0.0, "top_k": 0, "ignore_eos": False, "stop": ("x",),
        "logit_bias": ((3, 1.0),),
    }  # fmt: skip


def recorded(engine: ScriptedEngine) -> list[SamplingParams]:
    """What the requests that reach an engine have."""
    seen: list[SamplingParams] = []
    script = engine.script

    def spy(request: Any) -> list[int]:
        seen.append(request.params)
        return script(request)

    engine.script = spy
    return seen


@in_loop
async def test_requests_of_a_server() -> None:
    engine = ScriptedEngine(echo)
    seen = recorded(engine)
    tokenizer = byte_tokenizer()
    sampling = sampling_defaults({"temperature": 0.6, "top_k": 7, "max_length": 30})

    def open_model() -> OpenedModel:
        text = TextProcessor(tokenizer, tokenizer.eos_ids, engine.limits, sampling)
        return OpenedModel(["m"], text, lambda *calls: EngineThread(engine, *calls))

    async with serving_model(open_model) as (_, client):
        await client.generate("abc")
        await client.generate("abc", temperature=0, max_new_tokens=40)
        error = await refused(client.generate("x" * 30))
    assert (seen[0].temperature, seen[0].top_k, seen[0].max_new_tokens) == (0.6, 7, 27)
    assert (seen[1].temperature, seen[1].top_k, seen[1].max_new_tokens) == (0.0, 7, 40)
    assert "max_length of 30" in error.details()


def test_requests_of_the_offline_api() -> None:
    engine = ScriptedEngine(echo)
    seen = recorded(engine)
    sampling = SamplingDefaults({"temperature": 0.6, "max_new_tokens": 3})
    llm = LLM.over(engine, byte_tokenizer(), (EOS,), sampling)
    llm.generate(["a"])
    llm.generate(["a"], {"temperature": 0})
    llm.generate(["a"], SamplingParams(top_k=5))  # says everything
    llm.generate(["a", "b"], [{"top_k": 2}, SamplingParams()])
    list(llm.stream("a"))
    list(llm.stream("a", {"top_k": 9}))
    assert [(p.temperature, p.top_k, p.max_new_tokens) for p in seen] == [
        (0.6, 0, 3), (0, 0, 3), (1.0, 5, None), (0.6, 2, 3), (1.0, 0, None), (0.6, 0, 3),
        (0.6, 9, 3),
    ]  # fmt: skip
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, max_new_tokens=3)


# -- where it comes from ---------------------------------------------------------------------------


def folder_with(folder: Path, **generation: Any) -> Path:
    hf_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_it_travels_in_the_checkpoint(tmp_path: Path) -> None:
    stated = {"eos_token_id": [2, 0], "temperature": 0.7, "num_beams": 3, "max_length": 48}
    source = folder_with(tmp_path / "hf", **stated)
    convert(source, tmp_path / "orbax")
    for path in (source, tmp_path / "orbax"):
        generation = load_model(path).generation
        assert generation.eos_ids == (2, 0)
        assert generation.sampling == SamplingDefaults(
            {"temperature": 0.7}, max_length=48, not_honoured=("num_beams = 3",)
        )
        said = inspect_checkpoint(path).generation
        assert said == "temperature 0.7, max_length 48; not honoured: num_beams = 3"


def test_it_comes_with_gguf_metadata() -> None:
    sampling = {"temp": 0.6, "top_k": 40, "penalty_repeat": 1.1, "mirostat": 0, "min_p": 0.05}
    metadata = byte_level("gpt-2") | {f"general.sampling.{k}": v for k, v in sampling.items()}
    defaults = TextOptions().defaults(build_tokenizer(metadata))
    assert defaults.sampling == SamplingDefaults(
        {"temperature": 0.6, "top_k": 40, "repetition_penalty": 1.1, "min_p": 0.05}
    )
    odd = TextOptions().defaults(
        build_tokenizer(metadata | {"general.sampling.xtc_probability": 0.5})
    )
    assert odd.sampling.not_honoured == ("general.sampling.xtc_probability = 0.5",)


def test_what_takes_its_place(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "hf", eos_token_id=2, temperature=0.7, top_k=5)
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "generation_config.json"
    other.write_text(json.dumps({"eos_token_id": [0], "top_p": 0.5}))
    for options, eos, fields in (
        ({}, (2,), {"temperature": 0.7, "top_k": 5}),
        ({"generation_config": "none"}, (2,), {}),
        ({"generation_config": tmp_path / "other"}, (0,), {"top_p": 0.5}),
        ({"generation_config": str(other)}, (0,), {"top_p": 0.5}),
        (
            {"override_generation_config": {"top_k": None, "eos_token_id": 3}},
            (3,),
            {"temperature": 0.7},
        ),
    ):
        generation = load_model(source, text=TextOptions.read(**options)).generation
        assert (generation.eos_ids, generation.sampling.fields) == (eos, fields)
    with pytest.raises(CheckpointError, match="eos_token_id = 96 is not in the vocabulary of 96"):
        load_model(source, text=TextOptions(override={"eos_token_id": 96}))


def test_a_checkpoint_whose_own_defaults_are_broken(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "hf", temperature=-3)
    with pytest.raises(CheckpointError, match=r"temperature is -3.*--generation-config none"):
        load_model(source)
    load_model(source, text=TextOptions.read(generation_config="none"))
    assert "unusable: generation_config.json: temperature" in inspect_checkpoint(source).generation


# -- options ---------------------------------------------------------------------------------------


def test_options_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    for command in (("serve", "/nowhere", "--no-http"), ("generate", "/nowhere", "-p", "x")):
        for option, value, message in (
            ("--chat-template", broken, "broken.jinja: line 1: "),
            ("--chat-template", tmp_path / "none", "cannot be read: No such file"),
            ("--generation-config", tmp_path / "none", "does not exist; give auto, none, or a"),
            ("--generation-config", "vllm", "use none for this server's own defaults"),
            ("--generation-config", tmp_path, "top_p is 7"),
            ("--override-generation-config", '{"temperature": -1}', "temperature is -1"),
        ):
            result = run(*command, option, value)
            assert result.exit_code == 1 and message in result.stderr, result.output
            assert len(result.stderr.splitlines()) == 1
        for value in ("{", "[1]"):
            result = run(*command, "--override-generation-config", value)
            assert result.exit_code == 2 and "is no" in words(result)
    result = run("convert", "/nowhere", tmp_path / "x", "--chat-template", broken)
    assert result.exit_code == 1 and "broken.jinja: line 1: " in result.stderr


def test_the_command_line_generates_with_them(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}{{ messages[0].content }}")
    source = folder_with(tmp_path / "hf", eos_token_id=2, max_new_tokens=3, num_beams=4)
    ask = ("generate", "-p", "the", "--json", "--ignore-eos", "--log-level", "info", *TINY)
    log: list[str] = []

    def answer(*options: Any) -> dict[str, Any]:
        result = run(*ask, *options)
        assert result.exit_code == 0, result.output
        log.append(result.stderr)
        return json.loads(result.stdout.splitlines()[-1])

    plain = answer(source)
    assert len(plain["token_ids"]) == 3 and plain["finish_reason"] == "length"
    assert "generation defaults: max_new_tokens 3; EOS ids: 2" in log[0]
    assert log[0].count("WARNING generation defaults not honoured: num_beams = 4") == 1
    override = '{"max_new_tokens": 5, "temperature": 1.5}'
    drawn = answer(source, "--override-generation-config", override, "--seed", 3)
    assert len(drawn["token_ids"]) == 5 and drawn["token_ids"][:3] != plain["token_ids"]
    run("convert", source, tmp_path / "orbax", "--chat-template", template)
    for model, options in ((source, ("--chat-template", template)), (tmp_path / "orbax", ())):
        doubled = answer(model, "--chat", *options)
        assert doubled["prompt_token_ids"] == plain["prompt_token_ids"] * 2


def test_a_model_without_an_end_is_told_of(caplog):
    for ids in ((), (2,)):
        caplog.clear()
        _log_defaults(GenerationDefaults(ids, SamplingDefaults()))
        assert ("no end token" in caplog.text) == (not ids)
