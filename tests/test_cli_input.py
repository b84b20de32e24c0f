"""Standard input of the commands: UTF-8 in any locale, and one clear line about anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import ScriptedEngine, limits, says
from serving import server_thread

ROOT = Path(__file__).resolve().parent.parent
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "service")])
WIDE = limits(max_model_len=1000, kv_tokens=1000)
BAD = [
    (b"\xff\xfe bad\n", "byte 0xff at position 0"),
    (b"good so far \xe9t\xe9\n", "byte 0xe9 at position 12"),
    (b"cut short \xc3", "byte 0xc3 at position 10"),
    ("\ud800".encode("utf-8", "surrogatepass"), "byte 0xed at position 0"),
]


def command(*args, data, locale="C.UTF-8"):
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "LC_ALL": locale}
    line = [sys.executable, "-m", "jaxinfer_service", *args]
    return subprocess.run(line, env=environment, input=data, capture_output=True, timeout=300)


def assert_one_line(done, words):
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert line.startswith("jaxinfer: the input is not UTF-8") and words in line


def test_input_that_is_not_utf8_is_one_line():
    with server_thread(ScriptedEngine(says("x"), WIDE)) as address:
        for data, words in BAD:
            assert_one_line(command("chat", "--server", address, data=data), words)
        done = command("chat", "--server", address, data=b"fine\n\xff\n")
        assert done.stdout == b"x\n"  # what came before it is answered
        assert_one_line(done, "byte 0xff at position 0")


def test_a_prompt_that_is_not_utf8_is_one_line():
    for data, words in BAD[:2]:
        assert_one_line(command("generate", "demo", "--prompt", "-", data=data), words)


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "POSIX"])
def test_utf8_is_read_in_any_locale(locale):
    said = []

    def script(request):
        said.append(bytes(request.prompt).decode())
        return says("yes")(request)

    with server_thread(ScriptedEngine(script, WIDE)) as address:
        done = command("chat", "--server", address, data="été 名\r\n".encode(), locale=locale)
    assert done.returncode == 0, done.stderr
    assert said == ["user: été 名\nassistant:"]
