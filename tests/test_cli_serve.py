"""`jaxinfer serve` as a process: ports, signals, exit codes; and an interactive chat with it."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
from fake_engine import ScriptedEngine, forever, limits
from jaxinfer_service.client import Client
from jaxinfer_service.server import ListenError, check_listen
from serving import PATIENCE_S, free_port, server_thread, wait_until
from test_cli import ENVIRONMENT, TINY, in_process, run
from tiny_checkpoint import hf_folder

# Makes standard input the controlling terminal, so that Ctrl-C is a signal.
IN_ITS_TERMINAL = (
    "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "from jaxinfer_service.cli import main; main()"
)
START_SECONDS = 240  # compiles on a busy machine with a cold cache


@contextlib.contextmanager
def serve_process(*args):
    """A `jaxinfer serve` process, and its port once it listens."""
    port = free_port()
    ports = ("--port", str(port), "--http-port", "0")
    command = [sys.executable, "-m", "jaxinfer_service", "serve", *args, *ports]
    process = subprocess.Popen(
        [str(part) for part in command], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: listening(port) or process.poll() is not None)
        yield process, port
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_process_serves_drains_on_sigterm_and_leaves_with_0(tmp_path):
    with serve_process(hf_folder(tmp_path / "tiny"), *TINY) as (process, port):
        second = in_process("serve", tmp_path / "tiny", "--port", port)
        assert second.returncode == 1  # while the first one still loads
        assert second.stderr.splitlines() == [
            f"jaxinfer: cannot listen on 127.0.0.1:{port}: the port is in use;"
            " stop what uses it or choose another --port"
        ]
        with Client(f"127.0.0.1:{port}") as client:
            client.wait_ready(START_SECONDS)
            answer = client.generate("the a", temperature=0, max_new_tokens=8, ignore_eos=True)
            chunks = client.stream("the a", temperature=0, max_new_tokens=8, ignore_eos=True)
            assert [i for chunk in chunks for i in chunk.token_ids] == list(answer.token_ids)
            assert client.detokenize(answer.token_ids) == answer.text
            running = client.stream("the a", max_new_tokens=50, ignore_eos=True)
            first = next(iter(running))
            process.send_signal(signal.SIGTERM)
            rest = list(running)
            assert rest[-1].usage.generated_tokens == 50 and first.model == "tiny"
        assert process.wait(PATIENCE_S) == 0
        log = process.stderr.read()
    for words in ("KV pool", f"serving host=127.0.0.1 port={port}", "draining", "stopped"):
        assert words in log
    assert "Traceback" not in log


def test_a_signal_while_loading_leaves_at_once_with_0(tmp_path):
    with serve_process(hf_folder(tmp_path / "tiny"), *TINY) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_model_that_cannot_be_loaded_is_one_line():
    done = in_process("serve", "/nowhere/model", "--port", "0", "--no-http")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("jaxinfer: /nowhere/model does not exist")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--no-http", "--http-port", "8000"], "--no-http is given, and --http-port"),
        (["--no-http", "--metrics-prefix", "vllm"], "and --metrics-prefix, which is of HTTP"),
        (["--no-http", "--allowed-origins", "*"], "and --allowed-origins, which is of HTTP"),
        (["--port", "8000"], "gRPC and HTTP cannot both have port 8000"),
        (["--metrics-prefix", ""], "the metrics prefix is ''"),
        (["--api-keys", "/nowhere/keys"], "--api-keys /nowhere/keys cannot be read: No such file"),
        (["--served-model-name", ""], "--served-model-name '': give names"),
        (["--served-model-name", "a", "--served-model-name", "a"], "'a': give names, each of"),
    ],
)
def test_options_that_contradict_each_other_are_named(options, said):
    result = run("serve", "/nowhere", *options)
    assert result.exit_code == 1 and said in result.output


def test_spans_have_to_have_a_place_to_go():
    done = in_process("serve", "/nowhere/model", "--otlp-traces-endpoint", "here")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("jaxinfer: --otlp-endpoint is 'here'")


@pytest.mark.parametrize(("option", "other"), [("--port", "--no-http"), ("--http-port", "--http")])
def test_the_port_is_checked_before_the_model(option, other):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free = () if option == "--port" else ("--port", free_port())
        done = in_process("serve", "/nowhere/model", option, port, other, *free)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "the port is in use" in line
    assert f"choose another {option}" in line


@pytest.mark.parametrize(
    ("host", "number", "advice"),
    [
        ("127.0.0.1", errno.EACCES, "below 1024"),
        ("127.0.0.1", errno.EADDRINUSE, "in use"),
        ("192.0.2.1", None, "no such address"),  # reserved for documentation: nobody has it
        ("no.such.host.invalid", None, "no such address"),
    ],
)
def test_what_cannot_be_listened_on_is_explained(host, number, advice, monkeypatch):
    if number is not None:

        def bind(self, address):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(ListenError, match=advice):
        check_listen(host, 80)


def test_interactive_chat_stops_an_answer_with_ctrl_c():
    wide = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
    engine = ScriptedEngine(forever, wide, step_seconds=0.005)
    with server_thread(engine) as address:
        terminal, inside = pty.openpty()
        command = [sys.executable, "-c", IN_ITS_TERMINAL, "chat", "--server", address]
        process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=inside, stdout=inside, stderr=inside,
            start_new_session=True,
        )  # fmt: skip
        os.close(inside)
        screen = Screen(terminal)
        try:
            screen.wait_for("> ")
            os.write(terminal, b"hello\n")
            screen.wait_for('!"#$%&')  # what the scripted model says
            os.write(terminal, b"\x03")
            screen.wait_for("\n> ")
            wait_until(lambda: not engine.has_work)
            os.write(terminal, b"/quit\n")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)


class Screen:
    """What a terminal has shown and was not waited for yet."""

    def __init__(self, terminal):
        self._terminal = terminal
        self._text = ""

    def wait_for(self, words, seconds=PATIENCE_S):
        end = time.monotonic() + seconds
        while words not in self._text:
            left = end - time.monotonic()
            assert left > 0, f"{words!r} did not appear in {self._text!r}"
            if select.select([self._terminal], [], [], left)[0]:
                data = os.read(self._terminal, 4096).decode(errors="replace")
                self._text += data.replace("\r", "")
        self._text = self._text.partition(words)[2]
