"""What is done with a case: its results checked, its times taken, its block sizes searched.

Each returns a record for the report. A dry run takes the same steps at tiny sizes, interpreted on
the CPU, and compiles the full sizes for a GPU that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.gpu_check.hlo import Module
from jaxinfer.gpu_check.on_device import timing
from jaxinfer.gpu_check.on_device.registry import Baseline, DeviceCase, Inputs, Purpose
from jaxinfer.roofline.devices import Device
from jaxinfer.sharding import replicated
from pallas_kernels.tuning import Tiling

SEED = 5
WORTH = 0.98  # of the rule's time: what is not faster than that is not worth an entry
DRY_TILINGS = 2  # of those to search, that a dry run tries
COMPILERS = 8  # programs compiled at a time

Record = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Where tasks run.

    Attributes:
        device: what the floors are of; None: a device that no data sheet is known of.
        compile_for: in a dry run, GPUs to compile for; None: there is no compiler.
        dry: nothing runs on a GPU.
    """

    device: Device | None
    compile_for: Mesh | None = None
    dry: bool = False

    @property
    def runs(self) -> int:
        return 1 if self.dry else timing.RUNS


def check(case: DeviceCase, setting: Setting) -> Record:
    """The kernel's result against its reference, both on the device at hand."""
    found = _difference(case, setting)
    record = {"difference": found, "tolerance": case.tolerance, "passed": found <= case.tolerance}
    return record | _compiled(case, setting, "check")


def _difference(case: DeviceCase, setting: Setting, tiling: Tiling | None = None) -> float:
    """The largest difference from the reference, relative to its largest entry; inf for NaN.

    Raises ValueError where they cannot be compared.
    """
    inputs = _inputs(case, "tiny" if setting.dry else "check")
    compared = case.compared or (lambda inputs, result: result)
    kernel, reference = _side_by_side(
        lambda run: timing.once.lower(inputs, run=lambda x: compared(x, run(x))).compile(),
        [_run(case, setting, tiling), case.reference],
    )
    found, wanted = jax.tree.leaves(kernel(inputs)), jax.tree.leaves(reference(inputs))
    most, largest = 0.0, 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        if ours.shape != theirs.shape:
            raise ValueError(f"the result is {ours.shape}, the reference {theirs.shape}")
        if not np.isfinite(theirs).all():
            raise ValueError("the reference is not finite; the case is wrong")
        difference = np.abs(ours - theirs).max()
        most = max(most, np.inf if np.isnan(difference) else float(difference))
        largest = max(largest, float(np.abs(theirs).max()))
    return most / largest if largest else most


def time(case: DeviceCase, setting: Setting) -> Record:
    """The kernel's time and its baselines', beside the floor."""
    sizes = case.sizes["tiny" if setting.dry else "time"]
    floor_us, bound = _floor(case, setting)
    times = 2 if setting.dry else timing.launches(floor_us)
    inputs = _inputs(case, "tiny" if setting.dry else "time")
    run = _run(case, setting)
    taken = _timed(run, inputs, times, setting, case.feed)
    record = {
        "sizes": dict(sizes),
        "us": asdict(taken),
        "floor_us": floor_us,
        "bound": bound,
        "target": case.target,
    }
    if floor_us and not setting.dry:
        part = floor_us / taken.median
        record |= {"of_floor": part, "met": case.target is None or part >= case.target}
    record["baselines"] = {
        name: _baseline(baseline, inputs, times, setting)
        for name, baseline in case.baselines.items()
    }
    return record | _compiled(case, setting, "time")


def search(case: DeviceCase, setting: Setting) -> Record:
    """The fastest block sizes, and what each took; sizes that do not compile say why."""
    tilings = (None, *(case.tilings[:DRY_TILINGS] if setting.dry else case.tilings))
    floor_us, _ = _floor(case, setting)
    times = 2 if setting.dry else timing.launches(floor_us)
    inputs = _inputs(case, "tiny" if setting.dry else "time")

    def build(tiling: Tiling | None) -> Any:
        try:
            run = _run(case, setting, tiling)
            return timing.repeated.lower(inputs, run=run, feed=case.feed, times=times).compile()
        except Exception as error:  # too many registers, too much shared memory
            return f"{type(error).__name__}: {error}"[:200]

    programs = dict(zip(tilings, _side_by_side(build, tilings)))
    found: dict[Tiling | None, float] = {}
    failed = {}
    for tiling, program in programs.items():
        if isinstance(program, str):
            failed[_words(tiling)] = program
        else:
            found[tiling] = timing.timed(program, inputs, times, setting.runs).median
    if None not in found:
        raise RuntimeError(f"the rule's own sizes do not compile: {failed[_words(None)]}")
    best = min(found, key=lambda tiling: found[tiling])
    worth = best is not None and found[best] < WORTH * found[None]
    if worth and (wrong := _difference(case, setting, best)) > case.tolerance:
        raise RuntimeError(f"{_words(best)} is the fastest, and differs by {wrong:.2e}")
    record: Record = {
        "us": {_words(tiling): us for tiling, us in found.items()},
        "failed": failed,
        "rule_us": found[None],
        "best_us": found[best],
        "best": best._asdict() if best is not None and worth else None,
        "tuned": list(case.tuned or ()),
    }
    for tiling in tilings if setting.dry else ():
        try:
            record |= _compiled(case, setting, "time", tiling)
        except Exception as error:  # they spill registers: a GPU would only find them slow
            if tiling is None:
                raise
            failed[_words(tiling)] = f"{type(error).__name__}: {error}"[:200]
    return record


TASKS: dict[str, Callable[[DeviceCase, Setting], Record]] = {
    "check": check,
    "time": time,
    "search": search,
}


def _run(
    case: DeviceCase, setting: Setting, tiling: Tiling | None = None, compiled: bool = False
) -> Callable[[Inputs], Any]:
    """The kernel as a function of its inputs; `compiled`: never interpreted."""
    interpret = setting.dry and not compiled
    return functools.partial(_call, case.run, interpret, tiling)


def _call(run: Any, interpret: bool, tiling: Tiling | None, inputs: Inputs) -> Any:
    return run(inputs, interpret, tiling)


def random_key() -> Any:
    """What inputs are made of."""
    return jnp.uint32(SEED)


def _inputs(case: DeviceCase, purpose: Purpose) -> Inputs:
    make = functools.partial(case.make, case.sizes[purpose])
    return timing.once(random_key(), run=make)


def _side_by_side(compile_one: Callable[[Any], Any], what: Sequence[Any]) -> list[Any]:
    """Programs compiled in threads, in order."""
    with ThreadPoolExecutor(COMPILERS) as pool:
        return list(pool.map(compile_one, what))


def _floor(case: DeviceCase, setting: Setting) -> tuple[float, str]:
    """Microseconds at full size, and the limit; (0, "") for a device that nothing is known of."""
    if setting.device is None:
        return 0.0, ""
    return case.work(case.sizes["time"]).floor(setting.device)


def _timed(
    run: Callable[[Any], Any], inputs: Any, times: int, setting: Setting, feed: Any = None
) -> timing.Timing:
    program = timing.repeated.lower(inputs, run=run, feed=feed, times=times).compile()
    return timing.timed(program, inputs, times, setting.runs)


def _baseline(baseline: Baseline, inputs: Inputs, times: int, setting: Setting) -> Record:
    """A baseline's times, or why there are none."""
    if baseline.gpu_only and setting.dry:
        return {"unavailable": "needs a GPU"}
    try:
        prepared = timing.once(inputs, run=baseline.prepare)
        if baseline.timed is not None:
            return {"us": asdict(baseline.timed(prepared, times, setting.runs))}
        assert baseline.run is not None
        return {"us": asdict(_timed(baseline.run, prepared, times, setting))}
    except Exception as error:  # somebody else's code: whatever it lacks is no failure of ours
        return {"unavailable": f"{type(error).__name__}: {error}"[:200]}


def _compiled(
    case: DeviceCase, setting: Setting, purpose: Purpose, tiling: Tiling | None = None
) -> Record:
    """In a dry run: the full sizes compiled for the GPU that is not there.

    Raises RuntimeError if the compiler made one launch of many.
    """
    mesh = setting.compile_for
    if mesh is None:
        return {}
    times = timing.launches(_floor(case, setting)[0]) if purpose == "time" else timing.LEAST
    make = functools.partial(case.make, case.sizes[purpose])
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        jax.eval_shape(make, random_key()),
    )
    run = _run(case, setting, tiling, compiled=True)
    with jax.set_mesh(mesh):
        lowered = timing.repeated.lower(inputs, run=run, feed=case.feed, times=times)
        program = lowered.compile()
    most = max(found.times for found in Module(program.as_text() or "").scheduled())
    if most < times - 1:
        raise RuntimeError(f"of {times} launches {most} are left in the compiled program")
    memory = program.memory_analysis()
    temporary = memory.temp_size_in_bytes if memory is not None else None
    return {"compiled": True, "launches": most + 1, "temp_bytes": temporary}


def _words(tiling: Tiling | None) -> str:
    return "rule" if tiling is None else " ".join(f"{k} {v}" for k, v in tiling._asdict().items())
