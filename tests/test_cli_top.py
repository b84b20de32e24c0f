"""`jaxinfer top`: its frames by hand-computable figures, and the command as a process."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_engine import LONG, ScriptedEngine, forever, says
from jaxinfer_service.cli.top import _frames, duration, frame
from jaxinfer_service.client import Client
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb
from jaxinfer_service.server import Server, ServerConfig
from serving import PATIENCE_S, in_loop, opened, server_thread, until
from test_cli import ENVIRONMENT, in_process
from test_cli_serve import Screen

INFO = pb.ServerInfoResponse(
    version="1.2", model_names=["a", "b"], dtype="float32", max_model_len=512, chunk_tokens=64,
    preset="mixed", prefix_cache=True, deterministic=True, determinism="fixed",
)  # fmt: skip
STEPS = [pb.StepRecord(step=i, time=8 + i, decodes=3, chunk_tokens=10 * i) for i in range(4)]


def update(**changes):
    load = pb.LoadResponse(
        time=3725, slots=8, running=3, waiting=5, waiting_tokens=700, page_size=16,
        pages=pb.Pages(free=6, cached=3, used=1),
        ttft=pb.Percentiles(p50=0.0125, p90=1.0, p99=2.0),
        counters=pb.Counters(
            received=20, finished=9, aborted=2, refused=1, preemptions=4, thrashes=1,
            prefix_queries=200, prefix_hits=50,
        ),
    )  # fmt: skip
    cells = bytes([1, 1, 2, 2, 2, *[0] * 45])
    fields = {"load": load, "steps": STEPS, "page_maps": [pb.PageMap(pages=50, cells=cells)]}
    return pb.WatchLoadResponse(**fields | changes)


def test_a_frame_shows_every_figure():
    assert frame("here:1", INFO, update(), 2.0, 110) == [
        "server    a, b at here:1, up 1 h 2 min",
        "          jaxinfer 1.2, float32, preset mixed, 512 tokens a sequence, chunks of 64,"
        " deterministic (fixed)",
        "slots     3 of 8 used",
        "          ###.....",
        "queue     5 waiting, 700 prompt tokens",
        "KV pages  1 used # (shared =), 3 cached +, 6 free ., of 10 with 16 tokens",
        "          ##+++" + "." * 45,
        "tokens/s  30 prefill, 6 decode, in 2 steps/s",
        "TTFT      p50 12.5 ms, p90 1000.0 ms, p99 2000.0 ms",
        "TPOT      none yet",
        "prefix    25% hits, 50 of 200 prompt tokens",
        "preempted 4, 1 of them thrashing",
        "requests  20 received, 9 finished, 2 aborted, 1 refused",
    ]


def test_a_frame_names_the_kinds_of_weights_and_pages_that_differ():
    info = pb.ServerInfoResponse(dtype="float32", quantization="w8a8", kv_dtype="int8")
    assert "float32, weights w8a8, KV int8, 0 tokens" in frame("s", info, update(), 2.0, 110)[1]
    info = pb.ServerInfoResponse(dtype="float32", quantization="none", kv_dtype="float32")
    assert "jaxinfer, float32, 0 tokens" in frame("s", info, update(), 2.0, 110)[1]


def test_a_frame_fits_its_width_and_wraps_the_map():
    lines = frame("here:1", INFO, update(), 2.0, 40)
    assert max(map(len, lines)) <= 40
    at = next(i for i, line in enumerate(lines) if line.startswith("KV pages"))
    assert lines[at + 1] == " " * 10 + "##+++" + "." * 25 and lines[at + 2] == " " * 10 + "." * 20
    assert [line.strip() for line in lines[1:5]] == [
        "jaxinfer 1.2, float32, preset",
        "mixed, 512 tokens a sequence,",
        "chunks of 64, deterministic",
        "(fixed)",
    ]
    many = update()
    many.load.slots, many.load.running = 1000, 1
    assert f"{' ' * 10}#{'.' * 29}" in frame("s", INFO, many, 2.0, 40)  # one is seen, too


def test_rates_are_over_the_time_of_the_steps_that_are_there():
    late = update(steps_left_out=5)
    late.load.time = 12  # the first step there was at 8
    assert "tokens/s  15 prefill, 3 decode, in 1 steps/s" in frame("s", INFO, late, 60.0, 100)
    none = update(steps=[], page_maps=[])
    assert "tokens/s  0 prefill, 0 decode, in 0 steps/s" in frame("s", INFO, none, 2.0, 100)


def test_rates_of_later_frames_are_over_the_time_between_updates():
    first, second = update(), update()
    second.load.time = first.load.time + 4
    shown = _frames("s", INFO, [first, second], 2.0, 100)
    rates = [line for lines in shown for line in lines if line.startswith("tokens/s")]
    assert [rate.split(" prefill")[0] for rate in rates] == ["tokens/s  30", "tokens/s  15"]


def test_what_there_is_nothing_of_is_said_so():
    off = pb.ServerInfoResponse(model_names=["m"])
    lines = frame("s", off, pb.WatchLoadResponse(), 1.0, 100)
    assert "prefix    cache is off" in lines and "TTFT      none yet" in lines
    assert "slots     0 of 0 used" in lines
    on = pb.ServerInfoResponse(prefix_cache=True)
    assert "prefix    nothing looked up yet" in frame("s", on, pb.WatchLoadResponse(), 1.0, 100)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (93_784, "1 d 2 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# -- the command -----------------------------------------------------------------------------------


def test_once_prints_one_frame_of_a_server_at_work():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.005)
    with server_thread(engine) as address, Client(address) as client:
        streams = [client.stream("abc"), client.stream("abc")]
        [next(iter(stream)) for stream in streams]  # both run
        streams.append(client.stream("abc"))
        time.sleep(1)
        done = in_process("top", "--server", address, "--once")
        for stream in streams:
            stream.cancel()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if line[0] != " ")
    assert len(done.stdout.splitlines()) == 13
    assert lines["server"].startswith(f"fake at {address}, up ")
    assert lines["slots"] == "2 of 2 used" and lines["queue"] == "1 waiting, 3 prompt tokens"
    assert "2 used # (shared =), 1 cached +, 5 free ., of 8 with 16 tokens" in lines["KV"]
    assert "          ##.....+" in done.stdout.splitlines()
    prefill, decode = (int(part.split()[0]) for part in lines["tokens/s"].split(", ")[:2])
    assert prefill == 0 < decode <= 2 / 0.005
    assert lines["requests"] == "3 received, 0 finished, 0 aborted, 0 refused"


def test_piped_it_prints_frame_after_frame_until_the_server_goes():
    with server_thread(ScriptedEngine(says("x"))) as address:
        command = [sys.executable, "-m", "jaxinfer_service", "top", "--server", address]
        process = subprocess.Popen(
            [*command, "--interval", "0.1"], env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        hurry = threading.Timer(PATIENCE_S, process.kill)  # or reading would wait for ever
        hurry.start()
        lines = [process.stdout.readline() for _ in range(3 * 14)]
        hurry.cancel()
    _, error = process.communicate(timeout=PATIENCE_S)
    assert [line for line in lines if line.startswith("slots")] == ["slots     0 of 2 used\n"] * 3
    assert lines[13] == lines[27] == "\n"
    assert process.returncode == 1
    assert len(error.splitlines()) == 1 and f"{address} answers no more" in error


def test_an_interrupt_leaves_with_0():
    with server_thread(ScriptedEngine()) as address:
        command = [sys.executable, "-m", "jaxinfer_service", "top", "--server", address]
        process = subprocess.Popen(
            command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, "")


def test_on_a_terminal_a_frame_takes_the_place_of_the_one_before():
    with server_thread(ScriptedEngine()) as address:
        terminal, inside = pty.openpty()
        command = [sys.executable, "-m", "jaxinfer_service", "top", "--server", address]
        process = subprocess.Popen(
            [*command, "--interval", "0.1"], env={**ENVIRONMENT, "TERM": "xterm"},
            stdin=inside, stdout=inside, stderr=inside,
        )  # fmt: skip
        os.close(inside)
        screen = Screen(terminal)
        try:
            for words in ("slots     0 of 2 used", "\x1b[1A", "slots     0 of 2 used"):
                screen.wait_for(words)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)


@in_loop
async def test_a_server_without_a_model_yet_is_no_missing_server():
    leave = threading.Event()
    server = Server(
        ServerConfig(port=0), lambda: leave.wait(10 * PATIENCE_S) and opened(ScriptedEngine())
    )
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server.port)
    address = f"127.0.0.1:{server.port}"
    done = await asyncio.to_thread(in_process, "top", "--server", address, "--once")
    server.shut_down()
    leave.set()
    await task
    assert done.returncode == 1 and done.stdout == ""
    why = "has nothing to show (UNAVAILABLE: the server is loading its model)"
    assert done.stderr.splitlines() == [f"jaxinfer: {address} {why}"]


def test_without_a_server_it_is_one_line():
    done = in_process("top", "--server", "127.0.0.1:1")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr and "jaxinfer serve" in done.stderr
    assert in_process("top", "--interval", "0.01").returncode == 2
