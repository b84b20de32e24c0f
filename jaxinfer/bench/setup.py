"""From a benchmark's command line to an engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.bench.do_nothing import do_nothing_model
from jaxinfer.bench.report import Report
from jaxinfer.checkpoints import LoadedModel
from jaxinfer.config import EngineConfig
from jaxinfer.cpu_kernels.choose import prepare_weights
from jaxinfer.cpu_kernels.prepare import without_panels
from jaxinfer.engine import Engine
from jaxinfer.llm import open_engine
from jaxinfer.quantization.quantise import quantised_model
from jaxinfer.startup import build_engine


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """An engine ready to be driven, and what it was built from."""

    engine: Engine
    model: LoadedModel
    config: EngineConfig

    def describe(self) -> dict[str, object]:
        """For the JSON of a result."""
        return {
            "model": self.model.description,
            "dtype": self.model.dtype,
            "engine": dataclasses.asdict(self.config),
            "compiles_after_ready": getattr(self.engine.compiles, "compiles_after_ready", None),
        }


def start(
    model: str, config: EngineConfig, dtype: str | None, progress: Report | None = None
) -> BenchEngine:
    """Load a model by name or path and compile its engine, as for serving."""
    loaded, engine = open_engine(model, config, dtype, progress)
    return BenchEngine(engine, loaded, dataclasses.replace(config, dtype=loaded.dtype))


def start_variant(bench: BenchEngine, setting: str, progress: Report | None = None) -> BenchEngine:
    """`start_changed` of one setting as it is written: FIELD=VALUE, VALUE as JSON.

    Raises ValueError naming the fields there are.
    """
    name, _, value = setting.partition("=")
    fields = [f.name for f in dataclasses.fields(EngineConfig) if f.name != "dtype"]
    if name not in fields or not value:
        raise ValueError(f"{setting!r}: write FIELD=VALUE, FIELD one of {', '.join(fields)}")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        parsed = value
    return start_changed(bench, {name: parsed}, progress)


def start_changed(
    bench: BenchEngine, changes: Mapping[str, Any], progress: Report | None = None
) -> BenchEngine:
    """A second engine on the same parameters, or on a copy of them in another form, with some
    fields of its configuration changed."""
    config, model = dataclasses.replace(bench.config, **changes), bench.model
    if changes.keys() & {"cpu_kernels", "tensor_parallel_size"}:  # which decide about panels
        model = dataclasses.replace(model, params=without_panels(model.params))
        prepare_weights(model, config)
    if "quantization" in changes:
        model = quantised_model(model, changes["quantization"])
        prepare_weights(model, config)
        config = dataclasses.replace(config, quantization=model.quantization)
    return BenchEngine(build_engine(model, config, progress), model, config)


def start_fake(layers: int, config: EngineConfig, progress: Report | None = None) -> BenchEngine:
    """The engine of a model that computes nothing, with the arguments of `layers` real layers."""
    model = do_nothing_model(layers, max_position=config.max_model_len or 4096)
    return BenchEngine(build_engine(model, config, progress), model, config)
