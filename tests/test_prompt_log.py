"""What is asked is in the log and in spans if the operator wants that, and bounded."""

from __future__ import annotations

import logging

import pytest
from fake_engine import LONG, ScriptedEngine, echo
from jaxinfer_service.cli.console import _TextFormatter
from jaxinfer_service.cli.options import LOGGED, logged_characters
from jaxinfer_service.prompt_log import beginnings
from jaxinfer_service.tracing.setup import open_tracing
from otlp import attributes, collecting
from serving import TOKENIZER, in_loop, serving

from jaxinfer.text import TextProcessor


@in_loop
async def test_prompts_are_logged_and_traced_when_asked_for(caplog):
    caplog.set_level("INFO", "jaxinfer_service.prompt_log")
    with collecting() as (collector, endpoint):
        tracing = open_tracing(endpoint)
        shown = {"tracing": tracing, "log_prompts": 7, "http_port": 0}
        async with serving(ScriptedEngine(echo, LONG), **shown) as (_, client):
            await client.generate("sesame, open", temperature=0)
            await client.generate([{"role": "user", "content": "hi"}])
        assert [attributes(span).get("jaxinfer.prompt") for span in collector.spans] == [
            "sesame,…", None, "user: h…", None,
        ]  # fmt: skip
    lines = [record for record in caplog.records if record.message == "prompt"]
    assert [(line.prompt, line.prompt_tokens) for line in lines] == [
        ("sesame,…", 12), ("user: h…", 19),
    ]  # fmt: skip
    assert lines[0].request == "r1" and "open" not in caplog.text


@in_loop
async def test_nothing_of_a_prompt_is_logged_otherwise(caplog):
    for name in (None, "jaxinfer", "jaxinfer_service"):
        caplog.set_level("DEBUG", name)
    async with serving(ScriptedEngine(echo, LONG), http_port=0) as (_, client):
        await client.generate("sesame")
    assert any(record.message == "finished" for record in caplog.records)
    assert "sesame" not in " ".join(str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", ""), ("abc", "abc"), ("abcd", "abc…"), ("😀😀😀", "😀😀😀"), ("😀😀😀😀", "😀😀😀…"),
     ("a" * 10_000, "aaa…")],
)  # fmt: skip
def test_the_beginning_of_a_prompt(prompt, said):
    text = TextProcessor(TOKENIZER, TOKENIZER.eos_ids, LONG)
    assert beginnings(text, 3)(text.encode(prompt)) == said


def test_a_prompt_cannot_pretend_to_be_a_line():
    record = logging.makeLogRecord({"msg": "prompt", "levelname": "INFO", "prompt": "a\nb é"})
    assert _TextFormatter().format(record).endswith("INFO prompt prompt='a\\nb é'")


def test_how_much_is_logged():
    assert logged_characters(False, None) is None
    assert (logged_characters(True, None), logged_characters(True, 5)) == (LOGGED, 5)
    with pytest.raises(ValueError, match="--log-prompts"):
        logged_characters(False, 5)
