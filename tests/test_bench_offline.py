"""The bench drivers: definitions over scripted engines, commands over tiny real ones."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import ScriptedEngine, forever, limits
from jaxinfer_service.bench import serve as bench_serve
from serving import in_loop, serving
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.bench.cli import app
from jaxinfer.bench.drive import decode_rate, drive, full_decode_steps
from jaxinfer.bench.offline import latency
from jaxinfer.bench.workload import WorkItem
from jaxinfer.request import FinishReason, SequenceEvent


class Tape:
    """An engine that plays back steps: (seconds it takes, {request: tokens}, requests that end)."""

    def __init__(self, *steps):
        self.limits = limits(max_model_len=1000, kv_tokens=1000)
        self.steps, self.now, self.received = list(steps), 100.0, []

    def clock(self) -> float:
        return self.now

    @property
    def has_work(self) -> bool:
        return bool(self.steps)

    def execute(self, command, now):
        self.received.append(command.request)

    def step(self, now):
        seconds, tokens, ends = self.steps.pop(0)
        self.now += seconds
        finish = dict.fromkeys(map(str, ends), FinishReason.LENGTH)
        return [
            SequenceEvent(str(i), (7,) * n, finish=finish.get(str(i))) for i, n in tokens.items()
        ]


# Two streams; the second one's prompt takes longer, so the first decodes alone beside it.
TWO_STREAMS = (
    (1.0, {}, ()),  # dispatched, nothing read yet
    (3.0, {0: 1}, ()),
    (4.0, {0: 1, 1: 1}, ()),
    (0.5, {0: 1, 1: 1}, ()),
    (1.5, {0: 1, 1: 1}, (0,)),
    (0.25, {1: 1}, (1,)),
)
ITEMS = [WorkItem((1,) * 30, 4), WorkItem((2,) * 50, 4)]


def test_rates_by_hand():
    tape = Tape(*TWO_STREAMS)
    run = drive(tape, ITEMS, 2, clock=tape.clock)
    assert run.first_token == {0: 4.0, 1: 8.0}
    assert run.ended == {0: 10.0, 1: 10.25}
    assert run.elapsed == 10.25
    assert (run.prompt_tokens, run.output_tokens) == (80, 8)
    # Only the steps of 0.5 s and 1.5 s gave both streams a token that was not a first one.
    assert full_decode_steps(run.marks, run.streams) == [(2, 0.5), (2, 1.5)]
    assert decode_rate(run.marks, run.streams) == 2.0
    assert run.prefill_rate == 80 / 8.0


def test_the_first_wave_is_what_runs_at_once():
    tape = Tape((2.0, {0: 1}, (0,)), (2.0, {1: 1}, (1,)))
    run = drive(tape, [WorkItem((1,) * 30, 1), WorkItem((2,) * 50, 1)], 1, clock=tape.clock)
    assert run.prefill_rate == 30 / 2.0
    assert decode_rate(run.marks, run.streams) is None  # there was no step that only decoded


def test_requests_are_greedy_and_run_to_their_length():
    tape = Tape(*TWO_STREAMS)
    drive(tape, ITEMS, 2, clock=tape.clock)
    assert [r.prompt for r in tape.received] == [item.prompt for item in ITEMS]
    assert {(r.params.temperature, r.params.ignore_eos, r.stop_ids) for r in tape.received} == {
        (0, True, ())
    }
    assert [r.max_new_tokens for r in tape.received] == [4, 4]


def test_a_failed_request_fails_the_benchmark():
    tape = Tape()
    tape.steps = [None]
    tape.step = lambda now: [SequenceEvent("0", finish=FinishReason.ERROR, error="not finite")]
    with pytest.raises(RuntimeError, match="request 0 ended by error: not finite"):
        drive(tape, ITEMS[:1], 1, clock=tape.clock)


def test_latency_leaves_warm_up_out():
    engine = ScriptedEngine(forever, step_seconds=0.01)
    reports = []
    result = latency(engine, [WorkItem((1,), 3)] * 2, 2, 3, lambda *r: reports.append(r))
    assert len(result["latencies"]) == 2
    assert min(result["latencies"]) >= 0.03
    assert result["percentiles"]["50"] == pytest.approx(result["avg_latency"])
    assert reports[-1] == ("batches", 5, 5)
    with pytest.raises(ValueError, match="--num-iters"):
        latency(engine, [WorkItem((1,), 3)], 0, 0)


def bench(*arguments: str) -> dict:
    """A bench command's JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = hf_folder(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    return str(folder)


SMALL = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--kv-cache-memory", "16000000")


def test_throughput_of_a_tiny_model(model):
    sizes = ("--num-prompts", "5", "--concurrency", "2", "--input-len", "9", "--output-len", "6")
    result = bench("throughput", model, *sizes, *SMALL)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (45, 30)
    assert result["output_tokens_per_second"] == pytest.approx(30 / result["elapsed_time"])
    assert result["decode_tokens_per_second"] > 0
    assert result["prefill_tokens_per_second"] > 0
    assert result["compiles_after_ready"] == 0


def test_latency_of_a_tiny_model(model):
    sizes = ("--batch-size", "2", "--input-len", "5", "--output-len", "4")
    result = bench("latency", model, *sizes, *SMALL, "--num-iters", "3")
    assert result["percentiles"]["99"] <= max(result["latencies"])
    assert len(result["latencies"]) == 3


def test_steps_names_every_program_that_ran(model):
    sizes = ("--concurrency", "2", "--input-len", "9", "--output-len", "6")
    result = bench("steps", model, *sizes, *SMALL)
    # Both prompts in one chunk, then five tokens each.
    assert result["programs"]["forward 2+64"]["runs"] == 1
    assert result["programs"]["forward 2+0"]["runs"] == 5
    assert result["host_decode"]["steps"] == 5
    assert 0 < result["host_decode"]["cpu_ms"]["median"] <= result["host_decode"]["wall_ms"]["p99"]


def test_steps_of_the_fake_model_take_the_arguments_of_a_real_one():
    sizes = ("--fake-layers", "3", "--concurrency", "4", "--input-len", "5", "--output-len", "3")
    result = bench("steps", "--fake-model", *sizes, *SMALL[2:])
    assert result["model"] == "a model that does nothing"
    assert result["host_decode"]["steps"] == 2
    assert result["compiles_after_ready"] == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("steps",), "--fake-model"),
        (("steps", "a-model", "--fake-layers", "3"), "--fake-layers"),
        (("steps", "--fake-model", "--dtype", "bfloat16"), "--dtype"),
        (("steps", "--fake-model", "--quantization", "w8a8"), "--quantization"),
        (("throughput", "/does/not/exist"), "does not exist"),
        (("throughput", "demo", "--dataset", "sharegpt", "--input-len", "5"), "draws its own"),
        (("serve", "--goodput", "ttft"), "METRIC:MILLISECONDS"),
        (("serve", "--request-rate", "0"), "--request-rate"),
        (("serve", "--dataset", "novels"), "synthetic"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_a_server_that_is_not_there_ends_in_one_line():
    result = CliRunner().invoke(app, ["serve", "--server", "127.0.0.1:1", "--wait", "0.5"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 is not serving" in result.output


@pytest.mark.parametrize("backend", ["grpc", "openai"])
@in_loop
async def test_load_on_a_server_by_either_door(backend, tmp_path):
    engine = ScriptedEngine(forever, limits(max_queued_requests=100))
    async with serving(engine, http_port=0) as (server, _):
        http = f"http://127.0.0.1:{server.http_port}"
        target = http if backend == "openai" else f"127.0.0.1:{server.port}"
        sizes = ("--num-prompts", "6", "--input-len", "4", "--output-len", "5")
        load = ("--request-rate", "200", "--burstiness", "inf", "--vocab-size", "250")
        where = ("--server", target, "--json", str(tmp_path / "out.json"))
        arguments = ["serve", *where, *sizes, *load, "--goodput", "ttft:60000,tpot:60000"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"], found["backend"]) == (6, 0, backend)
    assert found["total_output_tokens"] == 30
    assert found["output_lens"] == [5] * 6
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["mean_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert engine.counters.received == 7  # one asks first whether the server answers


@in_loop
async def test_refused_requests_are_reported():
    engine = ScriptedEngine(forever)
    async with serving(engine) as (server, _):
        arguments = ["serve", "--server", f"127.0.0.1:{server.port}", "--vocab-size", "5000"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.output


def test_the_bench_transport_is_registered():
    assert bench_serve.bench_serve in [c.callback for c in app.registered_commands]
