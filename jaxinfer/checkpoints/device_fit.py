"""What of a checkpoint would fit on a device that is not there, as a server would plan it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_pool import KVGroup, pages_for
from jaxinfer.memory_plan import MemoryPlan, MemoryPlanError, plan_memory, state_bytes
from jaxinfer.models import family_of
from jaxinfer.params import param_bytes
from jaxinfer.platform import allocator_fraction
from jaxinfer.quantization.kinds import NONE
from jaxinfer.quantization.savings import Savings, savings
from jaxinfer.quantization.weight import Layouts, quantised_specs
from jaxinfer.sizes import size_text

NOT_KNOWN = (
    "as a server with default options plans it ({seqs} sequences, {tokens} prompt tokens a step, "
    "{part:.0%} of the memory). The workspace is a bound: programs are measured when they are "
    "compiled. What else uses the device is not known"
)


@dataclass(frozen=True, slots=True)
class AbsentDevice:
    """A GPU of `size` bytes, of which JAX's allocator may take its share."""

    size: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(self.size * allocator_fraction())}


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The plan of memory, for sequences of at most `max_model_len` tokens; `problem` if even short
    ones have no room, or if those of the model's full length have not."""

    size: int
    dtype: str
    max_model_len: int
    plan: MemoryPlan | None = None
    groups: tuple[KVGroup, ...] = ()
    problem: str = ""
    quantization: str = NONE
    pages: str = ""
    saved: Savings | None = None  # by weights and pages of fewer bytes

    @property
    def title(self) -> str:
        kind = "" if self.quantization == NONE else f", {self.quantization}"
        pages = f", KV {self.pages}" if self.pages not in ("", self.dtype) else ""
        return f"on {size_text(self.size).replace('.00 ', ' ')}, {self.dtype}{kind}{pages}"

    def lines(self) -> Iterator[str]:
        """In words."""
        if self.problem:
            yield self.problem
        if self.plan is None:
            return
        if self.problem:
            yield f"with --max-model-len {self.max_model_len}:"
        yield from self.plan.lines(self.groups, self.max_model_len)[1:]
        if self.saved is not None:
            yield from self.saved.lines()
        page = sum(group.page_bytes for group in self.groups)
        if self.free > page * pages_for(self.max_model_len, self.groups[0].page_size):
            yield f"{size_text(self.free)} stay free, for more sequences (--max-num-seqs)"

    @property
    def free(self) -> int:
        """Bytes that the plan leaves unused: its pool holds all that can run at once."""
        if self.plan is None:
            return 0
        p = self.plan
        taken = p.weights_bytes + p.slot_bytes + p.workspace_bytes + p.pool_bytes
        return p.usable_bytes - taken

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"bytes": self.size, "dtype": self.dtype, "problem": self.problem}
        if self.plan is None:
            return fields
        p = self.plan
        return fields | {
            "max_model_len": self.max_model_len,
            "usable_bytes": p.usable_bytes,
            "weights_bytes": p.weights_bytes,
            "slot_bytes": p.slot_bytes,
            "workspace_bytes": p.workspace_bytes,
            "pool_bytes": p.pool_bytes,
            "free_bytes": self.free,
            "savings": self.saved and self.saved.to_json(),
            "kv_pools": [
                {"window": g.window, "layers": len(g.layers), "tokens": g.capacity}
                for g in self.groups
            ],
        }


def device_fit(
    model: ModelConfig,
    dtype: str,
    size: int,
    quantization: str = NONE,
    layouts: Layouts | None = None,
    kv_dtype: str | None = None,
) -> DeviceFit:
    """What would fit on a device of `size` bytes, with weights in a kind and pages of a dtype: at
    the model's full length, or else at the longest that fits."""
    config = EngineConfig(dtype=dtype, quantization=quantization, kv_dtype=kv_dtype)
    specs = family_of(model.family).param_specs(model)
    weights = param_bytes(quantised_specs(specs, quantization, dtype, layouts), dtype)

    def fit(
        length: int, plan: MemoryPlan | None = None, groups: tuple[KVGroup, ...] = ()
    ) -> DeviceFit:
        saved = None if plan is None else savings(model, config, plan, groups, length)
        kinds = (quantization, config.pages)
        return DeviceFit(size, dtype, length, plan, groups, problem, *kinds, saved)

    def plan(length: int) -> tuple[MemoryPlan, tuple[KVGroup, ...]]:
        kept = state_bytes(model, config, length)
        return plan_memory(model, config, length, weights, kept, AbsentDevice(size))

    problem = ""
    try:
        return fit(model.max_position, *plan(model.max_position))
    except MemoryPlanError as error:
        problem = f"does not fit: {error}"
    pages, too_many = 0, pages_for(model.max_position, config.page_size)
    while too_many - pages > 1:  # the longest, in pages
        middle = (pages + too_many) // 2
        try:
            plan(middle * config.page_size)
            pages = middle
        except MemoryPlanError:
            too_many = middle
    if not pages:
        return fit(0)
    length = pages * config.page_size
    return fit(length, *plan(length))


def not_known() -> str:
    """What the figures rest on, and what they leave out."""
    config = EngineConfig()
    return NOT_KNOWN.format(
        seqs=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        part=config.memory_utilization,
    )
