"""What `jaxinfer generate` says beside the answers, where no terminal shows bars."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jaxinfer_service.cli import app
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--kv-cache-memory", "1MiB",
        "--max-new-tokens", "3", "--ignore-eos")  # fmt: skip
COMPILING = re.compile(r"jaxinfer: compiling (\d+) programs, one to two minutes the first time")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def generate(model, *args):
    done = CliRunner().invoke(app, ["generate", str(model), *args, *TINY])
    assert done.exit_code == 0, done.output
    return done


def generate_in_a_process(model, cache):
    """With a program store of its own: JAX's cache, which the tests use, keeps programs out of it,
    and what it loaded for earlier tests is still in memory here."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-m", "jaxinfer_service", "generate", str(model), "-p", "the", *TINY]
    done = subprocess.run(
        command,
        env=environment
        | {"JAXINFER_CACHE": str(cache), "PYTHONPATH": f"{ROOT}:{ROOT / 'service'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_compiling_is_announced_once_and_only_if_there_is_any(tiny, tmp_path):
    first, second = generate_in_a_process(tiny, tmp_path), generate_in_a_process(tiny, tmp_path)
    assert first.stdout == second.stdout
    (line,) = first.stderr.splitlines()
    count = int(COMPILING.fullmatch(line)[1])
    stored = list(tmp_path.rglob("*.bin"))
    assert len(stored) == count > 3
    assert second.stderr == ""
    stored[0].unlink()
    third = generate_in_a_process(tiny, tmp_path)
    assert COMPILING.fullmatch(third.stderr.strip())[1] == "1"


def test_answers_to_several_prompts_are_told_apart(tiny):
    one, two = generate(tiny, "-p", "the").stdout, generate(tiny, "-p", "in\na").stdout
    both = generate(tiny, "-p", "the", "-p", "in\na").stdout
    assert both == f"--- 1 of 2: the\n{one}\n--- 2 of 2: in a\n{two}"
    assert "---" not in one
    long = generate(tiny, "-p", "the " * 20, "-p", "a").stdout
    assert max(map(len, re.findall("^---.*", long, re.M))) < 80


def test_samples_come_under_their_numbers_and_in_json(tiny):
    draws = ("-p", "the", "--temperature", "1", "--seed", "3")
    first = generate(tiny, *draws).stdout
    second = generate(tiny, *draws[:-1], "4").stdout
    assert first != second
    both = generate(tiny, *draws, "-n", "2").stdout
    assert both == f"--- sample 1 of 2\n{first}\n--- sample 2 of 2\n{second}"
    (line,) = generate(tiny, *draws, "--n", "2", "--json").stdout.splitlines()
    fields = json.loads(line)
    (more,) = fields["more"]
    assert [fields["text"] + "\n", more["text"] + "\n"] == [first, second]
    assert set(fields) - set(more) == {"model", "prompt_token_ids", "more"}
    two = generate(tiny, *draws, "-n", "2", "-p", "in").stdout
    assert two.startswith(f"--- 1 of 2: the\n{both}\n--- 2 of 2: in\n--- sample 1 of 2\n")


def test_a_prompt_is_scored_and_cut(tiny):
    """Against one of its own tokens less, whose output begins with what was scored."""
    scored = ("--json", "--prompt-logprobs", "2", "--max-new-tokens", "0")
    done = CliRunner().invoke(app, ["generate", str(tiny), "-p", "the cat sat", *TINY, *scored])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == [] and answer["finish_reason"] == "length"
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) - 1
    for entry, token in zip(answer["prompt_logprobs"], answer["prompt_token_ids"][1:]):
        assert entry["rank"] >= 1 and len(entry["top"]) == 2
        ranked = [top["token_id"] for top in entry["top"]]
        assert (entry["rank"] <= 2) == (token in ranked)
    cut = json.loads(
        generate(tiny, "-p", "the cat sat", "--json", "--truncate-prompt-tokens", "1").stdout
    )
    assert cut["prompt_token_ids"] == answer["prompt_token_ids"][-1:]
    assert "prompt_logprobs" not in cut
    refused = CliRunner().invoke(
        app, ["generate", str(tiny), "-p", "x", "--prompt-logprobs", "1", *TINY]
    )
    assert refused.exit_code == 2 and "--json" in refused.output
