"""The GPU check passes on the real programs, and fails on programs that break its promises.

Compiles for GPUs in processes of their own; nothing is executed. Needs the `gpu-check` extra.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from jaxinfer.config import EngineConfig
from jaxinfer.gpu_check import cli
from jaxinfer.gpu_check.cases import FEW_LAYERS, PROGRAMS, some_layers
from jaxinfer.gpu_check.checks import Check, Result
from jaxinfer.gpu_check.cli import run
from jaxinfer.gpu_check.hlo import Array, Module
from jaxinfer.gpu_check.target import TARGETS, environment
from jaxinfer.known_models import known_model
from jaxinfer.memory_plan import MemoryPlanError, plan_memory

ROOT = Path(__file__).resolve().parent.parent


def require_compiler() -> None:
    """On Linux its absence is a failure; for other systems it is not packaged."""
    if sys.platform != "linux":
        pytest.skip("no compiler for GPUs is packaged for this system")


LLAMA = "llama-3-8b"
TELLING = ("forward 64+0", "forward 8+256")  # what is compiled here of other models
COMPILED = [
    (*served, name)
    for served, names in PROGRAMS.items()
    for name in names
    if served[0] == LLAMA or name in TELLING
]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int, str], dict]:
    """What `scripts/gpu_check --json` prints, by model, GPUs and program."""
    require_compiler()
    others = dict.fromkeys(model for model, _ in PROGRAMS if model != LLAMA)
    found = {}
    for asked in (
        ["--model", LLAMA],
        [*(f"--model={model}" for model in others), *(f"--program={name}" for name in TELLING)],
    ):
        done = subprocess.run(
            [sys.executable, "scripts/gpu_check", "--json", *asked],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        rows = json.loads(done.stdout)["rows"]
        assert done.returncode == any(not row["passed"] for row in rows), done.stderr
        found |= {(row["model"], row["gpus"], row["program"]): row for row in rows}
    return found


@pytest.mark.parametrize("compiled", COMPILED, ids=str)
def test_the_engines_programs_pass(rows, compiled):
    row = rows[compiled]
    assert not row["error"] and len(row["checks"]) == 8
    assert {check["name"] for check in row["checks"] if not check["passed"]} == set()


def test_figures_are_of_the_real_plan(rows):
    for name in PROGRAMS[LLAMA, 1][:4]:
        one, eight = rows[LLAMA, 1, name]["figures"], rows[LLAMA, 8, name]["figures"]
        # Weights and pool fill most of a GPU's memory, and eight GPUs share the weights.
        assert one["argument_bytes"] > 16 << 30 and 0 < one["room_bytes"] < 20 << 30
        assert one["alias_bytes"] > 12 << 30
        assert eight["argument_bytes"] < one["argument_bytes"] / 2
        assert not one["collectives"]
        assert eight["collectives"] == {"all-reduce": 2 * FEW_LAYERS + 1, "all-gather": 1}
        assert 10 < one["layer_launches"]["dense"] < 24


def test_layers_of_each_kind_are_compiled():
    assert list(some_layers(known_model("gemma3-27b"), FEW_LAYERS)) == [2, 3, 4, 5]
    assert list(some_layers(known_model("deepseek-v3"), FEW_LAYERS)) == [1, 2, 3, 4]
    assert list(some_layers(known_model(LLAMA), FEW_LAYERS)) == [0, 1, 2, 3]


def test_deepseek_v3_in_bfloat16_is_refused_on_eight_gpus():
    """Until weights stay quantised: only some layers of it are compiled."""
    model, engine = known_model("deepseek-v3"), EngineConfig(tensor_parallel_size=8)
    weights = 671_026_419_200 * 2 // 8
    with pytest.raises(MemoryPlanError, match=r"does not fit.*weights 156.24 GiB.* is 8"):
        plan_memory(model, engine, 8192, weights, 0, TARGETS["h200"])


@pytest.fixture(scope="module")
def faults() -> dict[str, dict[str, str]]:
    """Failed checks of each faulty program, with what was found."""
    require_compiler()
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu_faults.py")],
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("fault", "failed", "detail"),
    [
        ("not donated", {"state aliased", "no copy of pool size"}, "0.0 MiB aliased of"),
        ("copies the pool", {"no copy of pool size", "temporaries"}, "bf16["),
        (
            "loops while the device says so",
            {"no control flow decided on the device", "launches"},
            "while",
        ),
        (
            "branches as the device says",
            {"no control flow decided on the device", "launches"},
            "cond",
        ),
        (
            "not pinned to the mesh",
            {"collectives", "results as the next program takes them", "launches"},
            "expected 1 all-gather, 3 all-reduce",
        ),
        ("attention by XLA", {"launches"}, " of 14 in layer 0"),
        ("too little memory", {"device memory"}, "of 65,536.0 MiB"),
        ("too little room for temporaries", {"temporaries"}, "of 1.0 MiB"),
    ],
)
def test_a_broken_promise_fails_its_check(faults, fault, failed, detail):
    assert set(faults[fault]) == failed
    assert any(detail in found for found in faults[fault].values()), faults[fault]


def test_the_unchanged_program_fails_no_check(faults):
    assert faults["none"] == {}


def test_a_dying_compiler_is_a_failed_row():
    died = run("x", [sys.executable, "-c", "import os; os.abort()"])
    assert not died.passed and "died of SIGABRT" in died.error
    raised = run("x", [sys.executable, "-c", "raise ValueError('no such tile')"])
    assert not raised.passed and raised.error == "ValueError: no such tile"


def test_a_failed_program_is_named_and_sets_the_exit_status(monkeypatch, capsys):
    found = json.dumps(Result("admit", checks=[Check("device memory", False, "9 of 8")]).to_json())
    print_it = [sys.executable, "-c", f"print({found!r})"]
    monkeypatch.setattr(cli.Job, "command", lambda self: print_it)
    with pytest.raises(typer.Exit) as left:
        cli.main(gpus=[1], program=["admit"])
    assert left.value.exit_code == 1
    assert "llama-3-8b, admit on 1 GPU: device memory: 9 of 8" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": "t4"}, "--target is one of h200"),
        ({"dry_run": True}, "--dry-run goes with --device"),
        ({"gpus": [3]}, "no such program; known: llama-3-8b on 1: forward 64+0"),
        ({"program": ["forward 3+3"]}, "no such program; known: llama-3-8b on 1: forward 64+0"),
        ({"model": ["llama-9"]}, "no such program; known: llama-3-8b on 1: forward 64+0"),
    ],
)
def test_what_is_not_there_is_refused(asked, said, capsys):
    with pytest.raises(typer.Exit) as left:
        cli.main(**asked)
    assert left.value.exit_code == 2
    assert said in " ".join(capsys.readouterr().err.split())


MODULE = """HloModule m, is_scheduled=true

%body (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[], /*index=1*/bf16[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %y = bf16[8,4]{1,0} fusion(%x, %i), kind=kLoop, calls=%update, metadata={op_name="jit(f)/jit(_layer)/add"}
  ROOT %t = (s32[], bf16[8,4]{1,0}) tuple(%i, %y)
}

%update (a: bf16[8,4], b: s32[]) -> bf16[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %row = bf16[1,4]{1,0} slice(%a), slice={[0:1], [0:4]}
  %new = bf16[8,4]{1,0} dynamic-update-slice(%a, %row, %b, %b)
  ROOT %same = bf16[8,4]{1,0} bitcast(%new)
}

ENTRY %main (x: bf16[8,4]) -> bf16[8,4] {
  %x.1 = bf16[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,4]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], bf16[8,4]{1,0}) while(%start), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %got = bf16[8,4]{1,0} get-tuple-element(%loop), index=1
  %sum = ((bf16[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%got), to_apply=%add
  ROOT %copy.1 = bf16[8,4]{1,0} copy(%got)
}
"""  # noqa: E501


def test_hlo_is_read_with_loops_shapes_and_updates_in_place():
    module = Module(MODULE)
    scheduled = {s.instruction.name: s for s in module.scheduled()}
    assert scheduled["y"].times == 5 and scheduled["y"].loop is scheduled["loop"].instruction
    assert scheduled["copy.1"].times == 1 and scheduled["copy.1"].loop is None
    assert "row" not in scheduled and scheduled["loop"].instruction.trip_count == 5
    assert scheduled["sum"].instruction.results == (Array("bf16", (8, 4)), Array("f32", (8, 4)))
    assert [a.nbytes for a in scheduled["sum"].instruction.results] == [64, 128]
    assert scheduled["y"].instruction.op_name == "jit(f)/jit(_layer)/add"
    assert module.updates_in_place(scheduled["y"].instruction, 0)
    assert not module.updates_in_place(scheduled["copy.1"].instruction, 0)
    assert scheduled["start"].instruction.operands == ("zero", "x.1")
