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
from jaxinfer.gpu_check import checks, cli
from jaxinfer.gpu_check.cases import FEW_LAYERS, PROGRAMS, Served, some_layers
from jaxinfer.gpu_check.checks import Check, Result
from jaxinfer.gpu_check.hlo import Array, Module
from jaxinfer.gpu_check.target import TARGETS, environment
from jaxinfer.known_models import known_model
from jaxinfer.memory_plan import MemoryPlanError, plan_memory
from jaxinfer.quantization.kinds import NONE

ROOT = Path(__file__).resolve().parent.parent


def require_compiler() -> None:
    """On Linux its absence is a failure; for other systems it is not packaged."""
    if sys.platform != "linux":
        pytest.skip("no compiler for GPUs is packaged for this system")


LLAMA = "llama-3-8b"
TELLING = ("forward 64+0", "forward 8+256")  # what is compiled here of other models
QUANTISED = [served for served in PROGRAMS if served.model == LLAMA and served.quantization != NONE]


def compiled_here(served: Served) -> tuple[str, ...]:
    if served in QUANTISED:
        return TELLING[:1]
    plain = served in (Served(LLAMA), Served(LLAMA, 8))
    return PROGRAMS[served] if plain else TELLING


HERE = {served: compiled_here(served) for served in PROGRAMS}
COMPILED = [(served, name) for served, names in HERE.items() for name in names]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[Served, str], Result]:
    """What is found, by what is served and program."""
    require_compiler()
    jobs = [cli.Job("h200", served, FEW_LAYERS, names) for served, names in HERE.items()]
    found = cli.compile_programs(jobs, 2, print)
    return {(job.served, result.program): result for job, result in found}


@pytest.mark.parametrize("compiled", COMPILED, ids=str)
def test_the_engines_programs_pass(rows, compiled):
    result = rows[compiled]
    assert not result.error and len(result.checks) == 9
    assert {check.name for check in result.checks if not check.passed} == set()


def test_the_script_prints_what_it_finds():
    require_compiler()
    asked = ["--model", LLAMA, "--gpus", "1", "--quantization", NONE, "--kv-cache-dtype", "auto"]
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check", "--json", *asked, "--program", "admit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["program"] == "admit" and row["passed"] and row["layers"] == FEW_LAYERS
    assert (row["model"], row["gpus"], row["quantization"]) == (LLAMA, 1, NONE)


def test_figures_are_of_the_real_plan(rows):
    for name in PROGRAMS[Served(LLAMA)][:4]:
        one, eight = (rows[Served(LLAMA, ways), name].figures for ways in (1, 8))
        # Weights and pool fill most of a GPU's memory, and eight GPUs share the weights.
        assert one.argument_bytes > 16 << 30 and 0 < one.room_bytes < 20 << 30
        assert one.alias_bytes > 12 << 30
        assert eight.argument_bytes < one.argument_bytes / 2
        assert not one.collectives
        assert eight.collectives == {"all-reduce": 2 * FEW_LAYERS + 1, "all-gather": 1}
        assert 10 < one.layer_launches["dense"] < 24


def test_pages_of_8_bits_take_no_launch_more_and_hold_twice_the_tokens(rows):
    for name in TELLING:
        plain = rows[Served(LLAMA), name].figures
        for kv_dtype in ("int8", "fp8"):
            figures = rows[Served(LLAMA, 1, NONE, kv_dtype), name].figures
            assert figures.layer_launches == plain.layer_launches
            assert figures.alias_bytes == pytest.approx(plain.alias_bytes, rel=0.01)


def test_layers_of_each_kind_are_compiled():
    assert list(some_layers(known_model("gemma3-27b"), FEW_LAYERS)) == [2, 3, 4, 5]
    assert list(some_layers(known_model("deepseek-v3"), FEW_LAYERS)) == [1, 2, 3, 4]
    assert list(some_layers(known_model(LLAMA), FEW_LAYERS)) == [0, 1, 2, 3]


def test_quantised_weights_are_read_in_fewer_bytes(rows):
    def weights(kind: str) -> float:
        return rows[Served(LLAMA, 1, kind), TELLING[0]].figures.weight_bytes

    vocabulary = 2 * 128_256 * 4096  # of which int8 takes half as well, and int4 has it in int8
    assert weights("int8") == weights("w8a8") == pytest.approx(weights(NONE) / 2, rel=1e-3)
    plain = weights(NONE) - 2 * vocabulary
    for kind in ("fp8", "w8a8-fp8"):
        assert weights(kind) - 2 * vocabulary == pytest.approx(plain / 2, rel=1e-3)
    of_rows = 2 * 128_256 * 4  # scales of the vocabulary's
    assert weights("int4") - vocabulary - of_rows == pytest.approx(
        plain * (4 + (32 + 8) / 128) / 16,
        rel=1e-3,  # a group has a scale and a zero point
    )
    assert weights("mxfp4") - 2 * vocabulary == pytest.approx(
        plain * (4 + 8 * 2 / 32) / 16, rel=1e-3
    )


def test_deepseek_v3_fits_on_eight_gpus_in_float8_only():
    model, engine = known_model("deepseek-v3"), EngineConfig(tensor_parallel_size=8)
    weights = 671_026_419_200 * 2 // 8
    with pytest.raises(MemoryPlanError, match=r"does not fit.*weights 156.24 GiB.* is 8"):
        plan_memory(model, engine, 8192, weights, 0, TARGETS["h200"])
    assert plan_memory(model, engine, 8192, weights // 2, 0, TARGETS["h200"])[0].pool_bytes


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
        ("copies the scales", {"no copy of pool size"}, "f32["),
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
        (
            "weights made numbers of",
            {"weights as stored", "temporaries", "launches"},
            "= bf16[28672,",
        ),
        ("too little memory", {"device memory"}, "of 65,536.0 MiB"),
        ("too little room for temporaries", {"temporaries"}, "of 1.0 MiB"),
    ],
)
def test_a_broken_promise_fails_its_check(faults, fault, failed, detail):
    assert set(faults[fault]) == failed
    assert any(detail in found for found in faults[fault].values()), faults[fault]


def test_the_unchanged_program_fails_no_check(faults):
    assert faults["none"] == {}


def as_if_compiled(monkeypatch, scripts: dict[tuple[str, ...], str]) -> None:
    """In the place of the compiler, what Python does for the programs that are left."""
    monkeypatch.setattr(
        cli.Job, "command", lambda self, left: [sys.executable, "-c", scripts[tuple(left)]]
    )


def test_what_a_compiler_dies_of_is_a_failed_row_and_the_next_is_compiled(monkeypatch):
    first, last = (f"print({json.dumps(Result(name).to_json())!r}, flush=True)" for name in "ad")
    scripts = {
        tuple("abcd"): f"{first}; import os; os.abort()",
        tuple("cd"): "raise ValueError('no such tile')",
        tuple("d"): last,
    }
    as_if_compiled(monkeypatch, scripts)
    done, died, raised, also = cli.run(cli.Job("h200", Served(LLAMA), 1, tuple("abcd")))
    assert done == Result("a") and also == Result("d")
    assert died.program == "b" and "died of SIGABRT" in died.error
    assert raised.program == "c" and raised.error == "ValueError: no such tile"
    monkeypatch.setattr(cli, "TIMEOUT", 1)
    as_if_compiled(monkeypatch, {("a",): "import time; time.sleep(60)"})
    (hung,) = cli.run(cli.Job("h200", Served(LLAMA), 1, ("a",)))
    assert hung.error == "the compiler took more than 1 s"


def test_a_failed_program_is_named_and_sets_the_exit_status(monkeypatch, capsys):
    found = json.dumps(Result("admit", checks=[Check("device memory", False, "9 of 8")]).to_json())
    as_if_compiled(monkeypatch, {("admit",): f"print({found!r})"})
    with pytest.raises(typer.Exit) as left:
        cli.main(gpus=[1], program=["admit"])
    assert left.value.exit_code == 1
    assert "llama-3-8b on 1 GPU, admit: device memory: 9 of 8" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": "t4"}, "--target is one of h200"),
        ({"dry_run": True}, "--dry-run goes with --device"),
        ({"gpus": [3]}, "no such program; known: llama-3-8b on 1 GPU: forward 64+0"),
        ({"program": ["forward 3+3"]}, "no such program; known: llama-3-8b on 1 GPU: forward 64+0"),
        ({"model": ["llama-9"]}, "no such program; known: llama-3-8b on 1 GPU: forward 64+0"),
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


LAYERS = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[4]) -> bf16[4] {
  %x = bf16[4]{0} parameter(0)
  %zeros = (s32[4]{0}, s32[4]{0}) fusion(), kind=kLoop, calls=%z, metadata={op_name="jit(f)/layer0/jit(_layer)/broadcast"}
  %zero.0 = s32[4]{0} get-tuple-element(%zeros), index=0
  %zero.1 = s32[4]{0} get-tuple-element(%zeros), index=1
  %own = bf16[4]{0} fusion(%x), kind=kLoop, calls=%o, metadata={op_name="jit(f)/layer1/jit(_layer)/norm"}
  %a = bf16[4]{0} fusion(%x, %zero.0), kind=kLoop, calls=%f, metadata={op_name="jit(f)/layer0/jit(_layer)/add"}
  %b = bf16[4]{0} fusion(%a, %zero.1, %own), kind=kLoop, calls=%f, metadata={op_name="jit(f)/layer1/jit(_layer)/add"}
  ROOT %c = bf16[4]{0} fusion(%a, %b), kind=kLoop, calls=%f, metadata={op_name="jit(f)/layer2/jit(_layer)/add"}
}
"""  # noqa: E501


def test_what_is_made_once_for_several_layers_is_of_none():
    """Unlike what a layer makes and others read, and what a layer makes of nothing for itself."""
    module = Module(LAYERS)
    shared = checks._for_several(module)
    launches = list(filter(checks._launches, module.scheduled()))
    assert shared == {"zeros"}
    assert checks._by_layer(launches, shared) == {None: 1, 0: 1, 1: 2, 2: 1}
    assert checks._by_layer(launches, set()) == {0: 2, 1: 2, 2: 1}
