"""From a benchmark's command line to an engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxinfer.bench.report import Report
from jaxinfer.checkpoints import LoadedModel, load_model
from jaxinfer.config import EngineConfig
from jaxinfer.demo import DEMO, demo_checkpoint
from jaxinfer.engine import Engine
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


def load(model: str, dtype: str | None, progress: Report | None = None) -> LoadedModel:
    """The model of that name or path; `demo` is fetched and converted if it has to be."""
    path = demo_checkpoint(progress) if model == DEMO else model
    return load_model(path, dtype=dtype, progress=progress)


def start(model: LoadedModel, config: EngineConfig, progress: Report | None = None) -> BenchEngine:
    """Compile everything, as for serving."""
    return BenchEngine(build_engine(model, config, progress), model, config)
