"""What `jaxinfer plan` says: the memory of a model on a device, and the floors of its steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxinfer.checkpoints import orbax_io
from jaxinfer.checkpoints.load import open_source, resolve_model
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.known_models import known_model, known_models
from jaxinfer.memory_plan import MemoryPlanError
from jaxinfer.models.hf_config import model_config
from jaxinfer.roofline.devices import Device
from jaxinfer.roofline.memory import PaperPlan, plan_on_paper, weights_bytes
from jaxinfer.roofline.step import Serving, StepFloor, StepLoad, step_floor
from jaxinfer.sizes import size_text

ON_PAPER = "floors on paper, from shapes and data sheets: nothing was executed"


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on devices: the memory plan, or why there is none, bytes of its weights on each, and
    the floors of its steps."""

    name: str
    device: Device
    serving: Serving
    memory: PaperPlan | None
    refused: str
    weights: int
    floors: tuple[StepFloor, ...]

    def fits(self, load: StepLoad) -> bool:
        rows = load.batch + (1 if load.chunk else 0)
        return self.memory is not None and self.memory.fits(rows, load.context)

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "model": self.name,
            "device": self.device.name,
            "source": self.device.source,
            "executed": False,
            "serving": dataclasses.asdict(self.serving),
            "refused": self.refused,
            "weights_bytes": self.weights,
            "memory": memory
            and dataclasses.asdict(memory.memory)
            | {
                "kv_bytes_per_token": memory.kv_bytes_per_token,
                "kv_tokens": memory.capacity,
                "max_model_len": memory.max_model_len,
                "not_served": memory.not_served,
            },
            "floors": [self._floor_json(floor) for floor in self.floors],
        }

    def _floor_json(self, floor: StepFloor) -> dict[str, Any]:
        parts = {part: {"us": us, "bound": bound} for part, (us, bound) in floor.parts.items()}
        return dataclasses.asdict(floor) | {
            "parts": parts,
            "bound": floor.bound,
            "tokens_per_second": floor.tokens_per_second,
            "fits": self.fits(floor.load),
        }


def read_model(name: str) -> tuple[ModelConfig, str]:
    """The model of a checkpoint or of a known name, and the dtype it is in. Loads no weights; of a
    Hugging Face folder config.json is enough.

    Raises CheckpointError or ValueError saying what it may be.
    """
    if name in known_models() and not Path(name).exists():
        return known_model(name), "bfloat16"
    if not Path(name).expanduser().exists() and "/" not in name and not name.endswith(".gguf"):
        return known_model(name), ""  # which says what names are known
    path = resolve_model(name)
    if orbax_io.is_orbax_folder(path):
        manifest = orbax_io.read_manifest(path)
        return manifest.config, manifest.dtype
    if path.is_dir() and (path / "config.json").is_file():
        try:
            hf = json.loads((path / "config.json").read_text())
            kind = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
            return model_config(hf), str(kind)
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from error
    source = open_source(path)
    return source.config, source.dtype


def make_plan(
    name: str,
    model: ModelConfig,
    device: Device,
    serving: Serving,
    engine: EngineConfig,
    loads: Sequence[StepLoad],
) -> Plan:
    """Plan memory and compute the floors of steps; a plan that does not fit says so.

    Raises ShardingError when the model does not divide over the devices, ValueError when the device
    has no unit for what is multiplied.
    """
    memory, refused = None, ""
    try:
        memory = plan_on_paper(model, engine, serving, device)
    except MemoryPlanError as error:
        refused = str(error)
    floors = tuple(step_floor(model, load, serving, device) for load in loads)
    weights = weights_bytes(model, serving)
    return Plan(name, device, serving, memory, refused, weights, floors)


def memory_lines(plan: Plan) -> list[str]:
    """The engine's own start-up report, for a device that is not there."""
    gpus = plan.serving.gpus
    over = f" over {gpus} devices, each with" if gpus > 1 else ""
    lines = [f"{plan.name} on {plan.device.name}{over}:"]
    if plan.memory is None:
        return [*lines, f"weights {size_text(plan.weights)}", f"does not fit: {plan.refused}"]
    memory = plan.memory
    lines += memory.memory.lines(memory.groups, memory.max_model_len)
    lines.append(f"KV of a token: {size_text(memory.kv_bytes_per_token)}")
    if memory.page_ratio != 1:
        lines.append(f"pages of {plan.serving.pages} would hold {memory.capacity} tokens")
    if memory.not_served:
        lines.append(f"on paper only: the engine does not serve {memory.not_served}")
    return lines


def floor_table(plan: Plan) -> Table:
    """A row a step: its floor, the rates it allows, what limits it, and each part's share."""
    parts = list(dict.fromkeys(part for floor in plan.floors for part in floor.parts))
    table = Table(title=ON_PAPER, title_justify="left", caption=f"rates: {plan.device.source}")
    for heading in ("rows", "context", "chunk", "step\nµs", "TPOT\nms", "tokens/s", "a stream"):
        table.add_column(heading, justify="right")
    table.add_column("limit")
    for part in parts:
        table.add_column(f"{part}\n%", justify="right")
    table.add_column("fits")
    for floor in plan.floors:
        load, shares = floor.load, {part: us / floor.us for part, (us, _) in floor.parts.items()}
        table.add_row(
            *(str(load.batch), str(load.context), str(load.chunk or "-")),
            *(f"{floor.us:.0f}", f"{floor.us / 1e3:.2f}", f"{floor.tokens_per_second:.0f}"),
            f"{1e6 / floor.us:.0f}",
            floor.bound,
            *(f"{100 * shares[part]:.1f}" if part in shares else "-" for part in parts),
            "yes" if plan.fits(load) else "no",
        )
    return table
