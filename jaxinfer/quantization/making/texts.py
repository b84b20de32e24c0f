"""The calibration text that comes with the package: none of it is in what `jaxinfer eval` asks."""

from pathlib import Path

DEFAULT_TEXTS = Path(__file__).parent / "calibration.jsonl"
