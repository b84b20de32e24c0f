"""What `jaxinfer generate` says beside the answers, where no terminal shows bars."""

from __future__ import annotations

import contextlib
import re

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jaxinfer_service.cli import app
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

TINY = ("--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--kv-cache-memory", "1MiB",
        "--max-new-tokens", "3", "--ignore-eos")  # fmt: skip
COMPILING = re.compile(r"jaxinfer: compiling (\d+) programs, one to two minutes the first time")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@contextlib.contextmanager
def jax_cache_off():
    """JAX's own cache, which the tests use, keeps programs out of ours."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def generate(model, *args):
    done = CliRunner().invoke(app, ["generate", str(model), *args, *TINY])
    assert done.exit_code == 0, done.output
    return done


def test_compiling_is_announced_once_and_only_if_there_is_any(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path))
    with jax_cache_off():
        first, second = generate(tiny, "-p", "the"), generate(tiny, "-p", "the")
    assert first.stdout == second.stdout
    (line,) = first.stderr.splitlines()
    count = int(COMPILING.fullmatch(line)[1])
    stored = list(tmp_path.rglob("*.bin"))
    assert len(stored) == count > 3
    assert second.stderr == ""
    stored[0].unlink()
    with jax_cache_off():
        third = generate(tiny, "-p", "the")
    assert COMPILING.fullmatch(third.stderr.strip())[1] == "1"


def test_answers_to_several_prompts_are_told_apart(tiny):
    one, two = generate(tiny, "-p", "the").stdout, generate(tiny, "-p", "in\na").stdout
    both = generate(tiny, "-p", "the", "-p", "in\na").stdout
    assert both == f"--- 1 of 2: the\n{one}\n--- 2 of 2: in a\n{two}"
    assert "---" not in one
    long = generate(tiny, "-p", "the " * 20, "-p", "a").stdout
    assert max(map(len, re.findall("^---.*", long, re.M))) < 80
