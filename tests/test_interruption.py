"""A signal ends a command with one line, and a conversion without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_checkpoint import hf_folder

from jaxinfer.checkpoints import convert
from jaxinfer.checkpoints.partial_folder import partial_folder, remove_stale

SLOW = {  # makes a moment last in which a signal can come, and says when it has begun
    "the command's imports": """
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "jaxinfer_service.cli":
                    wait()
        sys.meta_path.insert(0, Slow())
    """,
    "imports": """
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "jaxinfer.checkpoints.convert":
                    wait()
        sys.meta_path.insert(0, Slow())
    """,
    "reading": """
        from jaxinfer.checkpoints import safetensors_io
        safetensors_io.model_config = lambda *_: wait()
    """,
    "an extension's start, which makes another error of it": """
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "jaxinfer.checkpoints.convert":
                    try:
                        wait()
                    except BaseException:
                        pass
                    raise ImportError("an extension")
        sys.meta_path.insert(0, Slow())
    """,
    "JAX's plugins, which it logs and goes on": """
        class Slow:
            def find_spec(self, name, path=None, target=None):
                if name == "jaxinfer.checkpoints.convert":
                    try:
                        wait()
                    except BaseException:
                        logging.getLogger("jax").exception("a plugin")
        import logging
        sys.meta_path.insert(0, Slow())
    """,
    "a finaliser, whose errors are ignored": """
        class Ignoring:
            def __del__(self):
                wait()
        sys.unraisablehook = lambda *_: None
        from jaxinfer.checkpoints import safetensors_io
        real = safetensors_io.model_config
        safetensors_io.model_config = lambda hf: (Ignoring(), real(hf))[1]
    """,
    "writing": """
        from jaxinfer.checkpoints import orbax_io
        orbax_io._inventory = lambda *_: wait()
    """,
    "removing, when another signal comes": """
        import os, shutil, signal
        from jaxinfer.checkpoints import orbax_io
        orbax_io._inventory = lambda *_: wait()
        removed = shutil.rmtree
        def remove(*args, **options):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            removed(*args, **options)
        shutil.rmtree = remove
    """,
}
START = """
import sys, time
def wait():
    print("now", flush=True)
    time.sleep(600)
{}
from jaxinfer_service.command import main
main()
"""


def interrupted(moment: str, number: int, *args: object) -> tuple[int, str]:
    """Exit code and standard error of a command that gets a signal in the midst of something."""
    script = START.format(textwrap.dedent(SLOW[moment]))
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        # A shell may have had its children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n", process.communicate()[1]
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("imports", signal.SIGINT, 130),
        ("reading", signal.SIGTERM, 143),
        ("an extension's start, which makes another error of it", signal.SIGINT, 130),
        ("JAX's plugins, which it logs and goes on", signal.SIGINT, 130),
        ("a finaliser, whose errors are ignored", signal.SIGTERM, 143),
        ("writing", signal.SIGINT, 130),
        ("writing", signal.SIGTERM, 143),
        ("removing, when another signal comes", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_conversion_says_so_and_leaves_nothing(tmp_path, moment, number, code):
    hf_folder(tmp_path / "hf")
    target = tmp_path / "orbax"
    found, said = interrupted(moment, number, "convert", tmp_path / "hf", target)
    assert (found, said) == (code, f"jaxinfer: interrupted; nothing was written to {target}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_any_command_says_that_it_was_interrupted(number, code):
    found, said = interrupted("the command's imports", number, "generate", "demo", "-p", "x")
    assert (found, said) == (code, "jaxinfer: interrupted\n")


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path):
    source, target = hf_folder(tmp_path / "hf"), tmp_path / "or.bax"
    found, _ = interrupted("writing", signal.SIGKILL, "convert", source, target)
    (left,) = tmp_path.glob(".or.bax.*.partial")
    assert found == -signal.SIGKILL and (left / "params").is_dir()
    others = [tmp_path / ".orbbax.0123abcd.partial", tmp_path / ".or.bax.mine.partial"]
    for folder in others:
        folder.mkdir()
    convert(source, target)
    assert not left.exists() and all(folder.is_dir() for folder in others)
    assert sorted(path.name for path in target.iterdir()) == [
        "jaxinfer.json",
        "params",
        "tokenizer",
    ]


def test_a_conversion_that_runs_is_left_alone(tmp_path: Path):
    target = tmp_path / "orbax"
    with partial_folder(target) as first:
        (first / "x").write_text("first")
        remove_stale(target)
        with pytest.raises(KeyError), partial_folder(target) as second:
            assert first.is_dir() and second.is_dir() and first != second
            raise KeyError
        assert not second.exists() and (first / "x").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["orbax"]
    assert [path.name for path in target.iterdir()] == ["x"]
    with pytest.raises(FileExistsError), partial_folder(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["orbax"]


def test_a_folder_without_a_lock_is_stale(tmp_path: Path):
    """Killed before it had one, or by a version that had none."""
    (tmp_path / ".orbax.0123abcd.partial" / "params").mkdir(parents=True)
    with partial_folder(tmp_path / "orbax"):
        assert not (tmp_path / ".orbax.0123abcd.partial").exists()
