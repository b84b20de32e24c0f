"""A process that does tasks on the device and prints a line of JSON after each.

It reads names of tasks, one a line, and ends with its input. After an error on a real device it
ends too: what a kernel that went wrong left behind could spoil the next one's results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from typing import Any

import jax

from jaxinfer.gpu_check.on_device.registry import case_called
from jaxinfer.gpu_check.on_device.tasks import TASKS, Record, Setting
from jaxinfer.gpu_check.target import TARGETS, devices
from jaxinfer.roofline.devices import DEVICES, device_called
from jaxinfer.sharding import make_mesh

STEP = "step"


def perform(task: str, setting: Setting) -> Record:
    """Do a task, named `kind: case` or `step`; what it found, or the error."""
    started = time.perf_counter()
    record: Record = {"task": task}
    try:
        if task == STEP:
            # Needs all that the engine does; kernels need little more than jax.
            from jaxinfer.gpu_check.on_device.step_task import whole_step

            record |= whole_step(setting)
        else:
            kind, _, name = task.partition(": ")
            case = case_called(name)
            if setting.dry and not case.interpretable:
                record["skipped"] = "cannot be interpreted on a CPU"
            elif (why := _lacking(case, setting)) is not None:
                record["skipped"] = why
            else:
                record |= TASKS[kind](case, setting)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        record["error"] = f"{type(error).__name__}: {error}"[:600]
        record["at"] = f"{where.filename}:{where.lineno}"
    return record | {"seconds": round(time.perf_counter() - started, 2)}


def _lacking(case: Any, setting: Setting) -> str | None:
    """Why the GPU at hand does not have a kernel."""
    if setting.dry:
        return None
    major, _, minor = str(jax.devices()[0].compute_capability).partition(".")
    capability = (int(major), int(minor))
    return None if case.runs_on(capability) else f"not for compute capability {major}.{minor}"


def setting_of(dry_for: str | None) -> Setting:
    """What this process finds. Raises RuntimeError without the GPU that it is to run on."""
    if dry_for is not None:
        return Setting(DEVICES[dry_for], make_mesh(devices(TARGETS[dry_for], 1)), dry=True)
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        raise RuntimeError(f"JAX found no GPU, but {device.device_kind}; install jax[cuda13]")
    try:
        return Setting(device_called(device.device_kind))
    except ValueError:
        return Setting(None)  # no floors, but results and times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run-for", choices=TARGETS)
    args = parser.parse_args()
    setting = setting_of(args.dry_run_for)
    ready = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        record = perform(line.rstrip("\n"), setting)
        print(json.dumps(record), flush=True)
        if "error" in record and not setting.dry:
            break


if __name__ == "__main__":
    main()
