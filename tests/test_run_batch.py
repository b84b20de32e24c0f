"""Files of requests: their format, the journal of answers, and going on after any end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_engine import ScriptedEngine, echo, limits
from jaxinfer_service import batch
from jaxinfer_service.batch import Answer, BatchError, Journal, read_requests
from jaxinfer_service.cli import app
from serving import opened
from typer.testing import CliRunner

MANY = limits(max_queued_requests=3)  # and two slots


def request(name, content="hi", url="/v1/chat/completions", **body):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **body}
    if url == "/v1/completions":
        body["prompt"] = body.pop("messages")[0]["content"]
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path, requests):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in requests))
    return path


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run-batch` over a scripted engine: (exit code, what was said, answers)."""

    def invoke(requests, engine=None, *options):
        engine = engine or ScriptedEngine(echo, MANY)
        module = sys.modules["jaxinfer_service.cli.run_batch"]  # its function has its name
        monkeypatch.setattr(module, "open_model", lambda source: opened(engine, ["m"]))
        source = write(tmp_path / "in.jsonl", requests)
        out = tmp_path / "out.jsonl"
        args = ["run-batch", str(source), str(out), "--model", "m", *options]
        result = CliRunner().invoke(app, args)
        return result, out

    return invoke


def test_every_request_is_answered_as_http_would(run):
    requests = [request(f"r{i}", f"héllo {i} 😀") for i in range(12)]
    requests.append(request("text", "one two", "/v1/completions", max_tokens=5, logprobs=1))
    result, out = run(requests)
    assert result.exit_code == 0, result.output
    assert "13 of 13 requests are answered, 0 of them with an error" in result.output
    found = {entry["custom_id"]: entry for entry in entries(out)}
    assert {*found} == {r["custom_id"] for r in requests}
    entry = found["r3"]
    assert {*entry} == {"id", "custom_id", "response", "error"} and entry["error"] is None
    assert entry["response"]["status_code"] == 200
    body = entry["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "user: héllo 3 😀\nassistant:"
    assert entry["response"]["request_id"] == body["id"] and body["usage"]["total_tokens"] > 0
    text = found["text"]["response"]["body"]
    assert text["choices"][0]["text"] == "one t" and text["choices"][0]["logprobs"]["tokens"]


def test_a_request_that_is_refused_has_its_error_and_others_their_answers(run):
    requests = [
        request("good"),
        request("bad", temperature=-1),
        request("other", model="gpt-9"),
        request("unknown", no_such_field=1),
    ]
    result, out = run(requests)
    assert result.exit_code == 1 and "3 of them with an error" in result.output
    found = {entry["custom_id"]: entry["response"] for entry in entries(out)}
    assert [found[name]["status_code"] for name in ("good", "bad", "other", "unknown")] == [
        200, 400, 404, 400,
    ]  # fmt: skip
    assert "temperature" in found["bad"]["body"]["error"]["message"]


def test_a_second_run_asks_only_what_is_missing(run):
    requests = [request(f"r{i}") for i in range(6)]
    result, out = run(requests[:4])
    before = out.read_bytes()
    out.write_bytes(
        before + b'{"id": "batch_req_0", "custom_id": "r4", "respon'
    )  # as a kill leaves it
    engine = ScriptedEngine(echo, MANY)
    result, out = run(requests, engine)
    assert result.exit_code == 0 and engine.counters.received == 2
    assert out.read_bytes().startswith(before)
    assert sorted(entry["custom_id"] for entry in entries(out)) == [f"r{i}" for i in range(6)]
    engine = ScriptedEngine(echo, MANY)
    result, _ = run(requests, engine)
    assert result.exit_code == 0 and "6 of 6" in result.output and not engine.counters.received


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: is no JSON"),
        ("[1]", "line 2: is no JSON object"),
        (json.dumps(request("")), "line 2: custom_id is ''"),
        (json.dumps(request("a")), "line 2: custom_id 'a' is that of line 1 too"),
        (json.dumps(request("b", url="/v1/embeddings")), "line 2: url is '/v1/embeddings'"),
        (json.dumps(request("b") | {"method": "GET"}), "line 2: method is 'GET'"),
        (json.dumps(request("b") | {"body": 3}), "line 2: body is no JSON object"),
        (json.dumps(request("b", stream=True)), "line 2: body.stream is set"),
        ("[" * 100_000, "line 2: is no JSON"),
    ],
)
def test_files_with_faults_are_refused_before_anything_is_asked(tmp_path, line, said):
    path = tmp_path / "in.jsonl"
    path.write_text(f"{json.dumps(request('a'))}\n{line}\n")
    with pytest.raises(BatchError) as caught:
        read_requests(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_empty_lines_and_a_missing_last_newline_do_not_matter(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(f"\n{json.dumps(request('a'))}\n\n{json.dumps(request('b'))}")
    assert [line.custom_id for line in read_requests(path)] == ["a", "b"]
    path.write_text("\n\n")
    with pytest.raises(BatchError, match="has no requests"):
        read_requests(path)


def test_answers_of_another_batch_and_other_files_are_left_alone(tmp_path):
    lines = read_requests(write(tmp_path / "in.jsonl", [request("a")]))
    out = tmp_path / "out.jsonl"
    for text in (
        '{"some": "file"}\n',
        '{"some": "file"}',  # no line of ours that was cut off
        "no JSON at all",
        '{"custom_id": "z", "response": {"status_code": 200}}\n',
        '{"custom_id": "a", "response": {"status_code": 200}}',
        json.dumps(request("a")),  # the requests themselves
    ):
        out.write_text(text)
        with pytest.raises(BatchError, match="name another file"), Journal(out, lines):
            pass
        assert out.read_text() == text
    out.unlink()
    with Journal(out, lines), pytest.raises(BatchError, match="another run writes"):
        Journal(out, lines).__enter__()


def test_an_answer_that_a_full_disk_cuts_off_leaves_no_trace(tmp_path, monkeypatch):
    """Nor does it spoil one that is written in the same moment."""
    out = tmp_path / "out.jsonl"
    lines = read_requests(write(tmp_path / "in.jsonl", [request("a"), request("b"), request("c")]))
    write_some, room = os.write, [None, 20, 0, None]  # bytes that a write finds; None: enough

    def write_what_fits(file, data):
        most = room.pop(0)
        if most == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_some(file, data[:most])

    monkeypatch.setattr(batch.os, "write", write_what_fits)
    with Journal(out, lines) as journal:
        journal.add("a", Answer(200, {}, {}))
        with pytest.raises(OSError, match=r"No space left on device: .*out.jsonl"):
            journal.add("b", Answer(200, {}, {}))
        journal.add("c", Answer(200, {}, {}))
    assert not room and [entry["custom_id"] for entry in entries(out)] == ["a", "c"]
    with Journal(out, lines) as journal:
        assert set(journal.answered) == {"a", "c"}


def test_a_full_queue_is_waited_for_and_a_failed_engine_is_not(tmp_path):
    source = write(tmp_path / "in.jsonl", [request("a"), request("b")])
    lines = read_requests(source)
    answers = [Answer(429, {"retry-after": "0"}, {}), Answer(200, {}, {"id": "x"})]
    answers.append(Answer(503, {}, {"error": {"message": "it burns"}}))

    async def ask(path, body):
        return answers.pop(0)

    with Journal(tmp_path / "out.jsonl", lines) as journal:
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(batch.run(source, lines, journal, ask, 1, lambda done, total: None))
        assert "it burns" in str(caught.value.exceptions[0])
    assert [e["custom_id"] for e in entries(tmp_path / "out.jsonl")] == ["a"]


def test_an_engine_that_fails_ends_it_with_its_reason(run):
    engine = ScriptedEngine(echo, MANY)
    engine.fail_with = MemoryError("the device is gone")
    result, out = run([request("a")], engine)
    assert result.exit_code == 1 and "the device is gone" in result.output
    assert entries(out) == []


CHILD = """
import os, sys
from fake_engine import ScriptedEngine, limits
from serving import opened
import jaxinfer_service.cli
seconds = float(os.environ["STEP_SECONDS"])
engine = ScriptedEngine(limits=limits(max_queued_requests=3), step_seconds=seconds)
module = sys.modules["jaxinfer_service.cli.run_batch"]
module.open_model = lambda source: opened(engine, ["m"])
from jaxinfer_service.command import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_lost_when_it_is_ended(tmp_path, number):
    names = [f"r{i}" for i in range(200)]
    source = write(tmp_path / "in.jsonl", [request(n, "x", "/v1/completions") for n in names])
    out = tmp_path / "out.jsonl"
    arguments = [sys.executable, "-c", CHILD, "run-batch", source, out, "--model", "m"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*arguments, "--concurrency", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"STEP_SECONDS": "0.1"},  # or it is done before anybody ends it
    )
    end = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and "of 200 requests are answered" in said
        return  # the rest is the same for every end
    begun = out.read_bytes().count(b"\n")
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=120,
        env=environment | {"STEP_SECONDS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert begun < 200 and sorted(e["custom_id"] for e in entries(out)) == sorted(names)
