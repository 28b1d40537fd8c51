"""How tests train a bottleneck: in seconds, of what `vision_models.py` makes."""

from __future__ import annotations

from edge_run.runtime.split.training import TrainConfig
from vision_models import SHAPE

RATES = (40, 80, 120)


def config(**options: object) -> TrainConfig:
    """Return the settings of a training without epochs, which `options` change."""
    fixed = {"rates_bytes": RATES, "mean": (0.4,), "deviation": (0.25,), "batch": 32, "threads": 1, "shape": SHAPE}
    return TrainConfig(**{**fixed, "feature_epochs": 0, "answer_epochs": 0, **options})  # type: ignore[arg-type]
