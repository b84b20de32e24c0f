"""`scripts/gpu_check --device`: dry runs of real cases, wrong kernels found out, workers that die,
and the table of block sizes that it writes and the kernels read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gpu_check import require_compiler

from jaxinfer.gpu_check.on_device import (
    attention,
    baselines,
    random_arrays,
    step_task,
    summary,
    tasks,
    timing,
)
from jaxinfer.gpu_check.on_device.registry import Baseline, DeviceCase, device_cases
from jaxinfer.gpu_check.on_device.session import Session, task_names
from jaxinfer.gpu_check.on_device.tasks import Setting
from jaxinfer.gpu_check.on_device.worker import perform
from jaxinfer.roofline import kernels
from jaxinfer.roofline.devices import DEVICES
from pallas_kernels import tuning
from pallas_kernels.paged_attention import triton_decode
from pallas_kernels.paged_attention.triton_blocks import Pool
from pallas_kernels.tuning import Tiling

ROOT = Path(__file__).resolve().parent.parent
H200 = Setting(DEVICES["h200"], dry=True)


def double(inputs, interpret, tiling):
    """A kernel of one product; with 7 rows a block it is wrong, with 5 it does not compile."""
    if tiling is not None and tiling.rows == 5:
        raise ValueError("too many registers")
    wrong = 1.5 if tiling is not None and tiling.rows == 7 else 1.0
    return inputs["x"] * 2 * wrong


EXAMPLE = DeviceCase(
    kernel="double",
    case="an example",
    sizes={name: {"rows": rows} for name, rows in (("tiny", 4), ("check", 64), ("time", 1024))},
    make=lambda sizes, key: {"x": random_arrays.normal(key, (sizes["rows"], 8))},
    run=double,
    reference=lambda inputs: inputs["x"] + inputs["x"],
    work=lambda sizes: kernels.elementwise("double", 8 * sizes["rows"], 8 * sizes["rows"]),
    tolerance=1e-6,
    tuned=("double", "8 columns"),
    tilings=(Tiling(5, 1, 1, 1), Tiling(6, 1, 1, 1)),
)


def test_a_right_kernel_passes_and_a_wrong_one_is_found_out():
    found = tasks.check(EXAMPLE, H200)
    assert found["passed"] and found["difference"] == 0
    wrong = dataclasses.replace(EXAMPLE, run=lambda x, i, t: double(x, i, Tiling(7, 1, 1, 1)))
    found = tasks.check(wrong, H200)
    assert not found["passed"] and found["difference"] == pytest.approx(0.5)
    assert "differs from the reference by 5.00e-01" in summary.failures([{"task": "x"} | found])[0]
    poisoned = dataclasses.replace(
        EXAMPLE, run=lambda x, i, t: double(x, i, t).at[0, 0].set(jnp.nan)
    )
    assert not tasks.check(poisoned, H200)["passed"]


def test_times_floors_and_what_is_not_there():
    missing = Baseline(lambda inputs: inputs, timed=lambda *_: __import__("no_such_library"))
    case = dataclasses.replace(EXAMPLE, baselines={"other": missing}, target=0.5)
    found = tasks.time(case, dataclasses.replace(H200, dry=False))
    assert found["floor_us"] == pytest.approx(2 * 8 * 1024 * 2 / 4.8e12 * 1e6)
    assert found["of_floor"] == found["floor_us"] / found["us"]["median"]
    assert found["met"] is (found["of_floor"] >= 0.5)
    assert found["us"]["launches"] == timing.MOST, "short kernels are launched often"
    assert "no_such_library" in found["baselines"]["other"]["unavailable"]
    unknown = tasks.time(case, Setting(None))
    assert "of_floor" not in unknown and unknown["us"]["median"] > 0


def test_the_search_goes_on_past_sizes_that_do_not_compile(monkeypatch):
    medians = iter([10.0, 8.0])
    one = timing.Timing(0, 0, 0, 1)
    monkeypatch.setattr(timing, "timed", lambda *_: dataclasses.replace(one, median=next(medians)))
    found = tasks.search(EXAMPLE, H200)
    assert found["best"] == Tiling(6, 1, 1, 1)._asdict() and found["best_us"] == 8
    assert list(found["failed"].values()) == ["ValueError: too many registers"]
    medians = iter([10.0, 8.0])
    with pytest.raises(RuntimeError, match="is the fastest, and differs by"):
        tasks.search(dataclasses.replace(EXAMPLE, tilings=(Tiling(7, 1, 1, 1),)), H200)
    medians = iter([10.0, 9.9])
    assert tasks.search(EXAMPLE, H200)["best"] is None, "hardly faster is not worth an entry"


def test_random_arrays_are_spread_as_they_say_and_differ_by_their_keys():
    one, two = random_arrays.split(jnp.uint32(5))
    shape = (64, 1000)
    normal, other = (np.asarray(random_arrays.normal(key, shape)) for key in (one, two))
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02 and abs(normal).max() < 5
    for a, b in ((normal, other), (normal[:-1], normal[1:]), (normal[:, :-1], normal[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    uniform = np.asarray(random_arrays.uniform(one, shape, 2.0, 4.0))
    assert 2 <= uniform.min() < 2.001 and 3.999 < uniform.max() <= 4
    assert abs(uniform.mean() - 3) < 0.02
    drawn, counts = np.unique(random_arrays.integers(two, shape, -3, 5), return_counts=True)
    assert drawn.tolist() == list(range(-3, 5))
    assert abs(counts / counts.mean() - 1).max() < 0.05


def test_launches_follow_one_another():
    """Each takes what the last one left, or is at least not left out."""
    grow = lambda inputs, last: {"x": inputs["x"] * 0 + last}  # noqa: E731
    run = lambda inputs: inputs["x"] + 1  # noqa: E731
    inputs = {"x": jnp.zeros(3, jnp.float32)}
    assert timing.repeated(inputs, run=run, feed=grow, times=5)[0] == 5
    assert timing.repeated(inputs, run=run, times=5)[0] == 1


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_others_attention_answers_the_same_question(phase):
    """Or its time would be no measure of ours."""
    cases = {case.name: case for case in device_cases()}
    case = cases[f"attention, {phase}, triton: SmolLM2"]
    sizes = case.sizes["tiny"] | {"uneven": 0, "context": 96, "chunk": 96, "pieces": 1}
    sizes |= {"slots": 3, "context": 128 if phase == "decode" else 96}
    inputs = case.make(sizes, jnp.uint32(1))
    other = case.baselines["XLA"]
    with jax.numpy_dtype_promotion("standard"):  # it is not ours
        theirs = np.asarray(other.run(other.prepare(inputs)), np.float32)
    ours = np.asarray(case.reference(inputs))
    if phase == "prefill":  # theirs has the page's end too, which nobody sees
        theirs = theirs[0]
    np.testing.assert_allclose(theirs.reshape(ours.shape), ours, atol=2e-2)


def test_features_that_others_do_not_compute_have_no_baseline():
    with_them = [case.case for case in device_cases() if case.baselines]
    assert "SmolLM2" in with_them and "gpt-oss" not in with_them and "int8 pages" not in with_them
    assert baselines.dense_baselines(attention.ATTENTION[0], "decode").keys() == {
        "XLA", "cuDNN", "torch",
    }  # fmt: skip


def test_cases_are_named_once_and_have_all_sizes():
    cases = list(device_cases())
    assert len({case.name for case in cases}) == len(cases) >= 33
    for case in cases:
        assert set(case.sizes) == {"tiny", "check", "time"}
        assert case.work(case.sizes["time"]).floor(DEVICES["h200"])[0] > 0.01
    names = task_names()
    kinds = [name.partition(":")[0] for name in names]
    assert kinds == sorted(kinds, key=["check", "step", "time", "search"].index)
    assert task_names(["step"]) == ["step"]


BESIDE = {c.kernel: c for c in device_cases() if not c.kernel.startswith("attention")}.values()


@pytest.mark.parametrize("case", BESIDE, ids=[case.name for case in BESIDE])
def test_kernels_beside_attention_agree_with_their_references_in_small(case, quick_compiler):
    """Interpreted; the whole dry run compiles them at full size too."""
    assert tasks._difference(case, H200) <= case.tolerance


def test_a_dry_run_takes_every_path(tmp_path):
    require_compiler()
    decode, prefill = (f"attention, {phase}, triton: SmolLM2" for phase in ("decode", "prefill"))
    names = (f"check: {decode}", f"check: {prefill}", f"time: {decode}")
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check", "--device", "--dry-run", "--out", str(tmp_path)]
        + [f"--only={name}" for name in names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing ran on a GPU" in done.stdout and "3 tasks done, 0 skipped" in done.stdout
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["executed_on_gpu"] is False and report["device"] == "cpu"
    *checks, timed = report["records"]
    for check in checks:
        assert check["passed"] and 0 < check["difference"] < check["tolerance"]
    for record in report["records"]:
        assert record["compiled"] and record["launches"] >= timing.LEAST
        assert record["temp_bytes"] < 64 << 20, "no copy of the pool"
    assert "us" in timed["baselines"]["XLA"] and "unavailable" in timed["baselines"]["cuDNN"]


def test_the_whole_step_is_the_engines(monkeypatch, quick_compiler):
    found = step_task.whole_step(H200)
    assert [row["rows"] for row in found["rows"]] == [1] and found["passed"] and found["met"]
    assert all(row["tokens_per_second"] * row["tpot_ms"] > 0 for row in found["rows"])
    assert "of_floor" not in found["rows"][0], "a dry run is no measurement"
    monkeypatch.setattr(step_task, "_peak_bytes", iter([1, found["promised_bytes"] + 1]).__next__)
    monkeypatch.setattr(step_task, "_decode", lambda *_: {"rows": 1, "met": False})
    over = step_task.whole_step(H200)
    assert not over["passed"] and not over["met"]
    (failure,) = summary.failures([{"task": "step"} | over])
    assert f"{found['promised_bytes']} promised" in failure


WORKER = """
    import json, os, sys, time
    print("a library says hello", flush=True)
    print(json.dumps({"ready": {"device": "NVIDIA H200", "jax": "x"}}), flush=True)
    for line in sys.stdin:
        task = line.strip()
        if "abort" in task: os.abort()
        if "hang" in task: time.sleep(600)
        record = {"task": task, "seconds": 0.1}
        if "raise" in task: record["error"] = "ValueError: no such tile"
        if "best" in task: record |= {"best": {"rows": 16, "columns": 32, "warps": 4, "stages": 3},
                                      "tuned": ["attention, decode, triton", "4 of 128"]}
        print(json.dumps(record | {"pid": os.getpid()}), flush=True)
        if "raise" in task: break
"""


def fake_session(out: Path, minutes: float = 10.0, script: str = WORKER) -> Session:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return Session(out, command, {}, dry=False, deadline=time.monotonic() + 60 * minutes)


def test_whatever_happens_to_a_worker_costs_one_task(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.gpu_check.on_device.session.LIMITS", {"check": 15.0})
    run = fake_session(tmp_path)
    names = ("one", "abort", "two", "three", "hang", "raise", "best")
    run.run([f"check: {name}" for name in names], lambda said: None)
    records = {record["task"].split()[1]: record for record in run.report["records"]}
    assert "died of SIGABRT" in records["abort"]["error"]
    assert "took more than 15 s" in records["hang"]["error"]
    assert records["raise"]["error"] == "ValueError: no such tile"
    pids = [records[name]["pid"] for name in ("one", "two", "three", "raise", "best")]
    assert pids[1] == pids[2] and len(set(pids)) == 4, "a new worker after each misfortune"
    assert json.loads((tmp_path / "results.json").read_text()) == run.report
    table = tuning.read(tmp_path / "tuned.json")
    assert table["NVIDIA H200"]["attention, decode, triton"]["4 of 128"]["columns"] == 32
    assert len(summary.failures(run.report["records"])) == 3
    shown = summary.table(run.report)
    assert shown.row_count == len(names)


def test_what_there_is_no_time_for_is_said(tmp_path, monkeypatch):
    run = fake_session(tmp_path, minutes=0)
    run.run(["check: one", "step"], lambda said: None)
    assert [record["skipped"] for record in run.report["records"]] == ["no time left"] * 2
    assert summary.as_words(run.report) == "0 tasks done, 2 skipped, 0 failed"
    monkeypatch.setattr("jaxinfer.gpu_check.on_device.session.LEAST_SECONDS", 0.5)
    run = fake_session(tmp_path, minutes=15 / 60)
    run.run(["check: one", "check: hang"], lambda said: None)
    done, cut = run.report["records"]
    assert done["pid"] and cut["skipped"] == "no time left", "cut by the budget, not by its own"


def test_without_a_gpu_nothing_is_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check", "--device", "--out", str(tmp_path), "--only=step"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cannot be run here" in done.stderr and "JAX found no GPU" in done.stderr


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from jaxinfer.gpu_check import cli
from jaxinfer.gpu_check.on_device import worker
from jaxinfer.gpu_check.on_device.registry import device_cases
print(len(list(device_cases())))
"""


def test_kernels_are_checked_where_little_is_installed():
    def required_by(*names):
        lines = [line for name in names for line in importlib.metadata.requires(name) or ()]
        return {re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line}

    needed = {"jax", "jaxtyping", "psutil", "rich", "typer"}  # as docs/gpu.md says
    others = required_by("jaxinfer") - needed - required_by(*needed)
    modules = importlib.metadata.packages_distributions().items()
    missing = {name for name, owners in modules if others & {*owners}}
    assert {"platformdirs", "grpc", "tokenizers"} <= missing
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list(device_cases()))


def test_an_error_names_its_place():
    record = perform("check: no such case", H200)
    assert "there is no case 'no such case'" in record["error"] and "registry.py" in record["at"]


def test_the_kernels_read_the_table_of_the_device_at_hand(monkeypatch):
    pool = Pool(jnp.zeros((2, 1, 16, 64), jnp.bfloat16), jnp.zeros((2, 1, 16, 64), jnp.bfloat16))
    chosen = lambda: triton_decode.choose_tiling(pool, 4, 64, None)  # noqa: E731
    assert chosen() == triton_decode.rule(4, 64)
    sizes = {"rows": 32, "columns": 16, "warps": 2, "stages": 1}
    table = {triton_decode.TUNED: {"4 of 64, pages of 16, bfloat16": sizes}}
    monkeypatch.setattr(tuning, "table", lambda: {"cpu": table})
    assert chosen() == Tiling(32, 16, 2, 1)
    monkeypatch.setattr(tuning, "table", lambda: {"NVIDIA H200": table})
    assert chosen() == triton_decode.rule(4, 64), "another device's"
    found = [case.tuned for case in device_cases() if case.case == "SmolLM2"]
    assert found[0] == (triton_decode.TUNED, "3 of 64, pages of 64, bfloat16")


def test_the_table_that_is_shipped_can_be_read_and_a_damaged_one_is_refused(tmp_path):
    assert isinstance(tuning.read(tuning.FILE), dict)
    file = tmp_path / "tuned.json"
    for sizes in ({"rows": 16}, {"rows": 0, "columns": 1, "warps": 1, "stages": 1}, []):
        file.write_text(json.dumps({"NVIDIA H200": {"a kernel": {"a shape": sizes}}}))
        with pytest.raises(ValueError, match="is no table of block sizes"):
            tuning.read(file)
