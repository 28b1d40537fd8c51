"""Run models that do not fit the device: `Model("model.gguf", memory="4GiB")`, text as llama.cpp would give it.

The public names are imported when they are first used: `import edge_run` alone loads neither llama.cpp nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_run.base.config import ModelConfig
    from edge_run.base.errors import (
        BudgetError,
        Cancelled,
        ConfigError,
        ContextFull,
        DeviceLost,
        EdgeRunError,
        KernelError,
        MeshError,
        ModelFileError,
        NotSupported,
        NotTrusted,
        PackedFileError,
        ProtocolError,
        TierReadError,
    )
    from edge_run.base.profile import DeviceProfile
    from edge_run.base.replay import Recording, Replay
    from edge_run.base.results import Forecast, Generation, Piece, Plan, Progress, Stats, to_json
    from edge_run.base.sampling_config import SamplingConfig
    from edge_run.prefetch.replay import replay
    from edge_run.runtime.embedding.results import Embeddings
    from edge_run.runtime.generation.async_model import AsyncModel
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.request import Request, Turn
    from edge_run.runtime.planning.plan import plan
    from edge_run.runtime.probing.probe import probe
    from edge_run.runtime.split.async_model import AsyncSplitModel
    from edge_run.runtime.split.model import SplitModel
    from edge_run.runtime.tools.inflate import inflate
    from edge_run.runtime.tools.tracing import trace

__version__ = "0.1.0"

_HOME = {
    "Model": "edge_run.runtime.generation.model",
    "AsyncModel": "edge_run.runtime.generation.async_model",
    **dict.fromkeys(("Request", "Turn"), "edge_run.runtime.generation.request"),
    "Embeddings": "edge_run.runtime.embedding.results",
    "SplitModel": "edge_run.runtime.split.model",
    "AsyncSplitModel": "edge_run.runtime.split.async_model",
    "inflate": "edge_run.runtime.tools.inflate",
    "plan": "edge_run.runtime.planning.plan",
    "probe": "edge_run.runtime.probing.probe",
    "DeviceProfile": "edge_run.base.profile",
    "Recording": "edge_run.base.replay",
    "Replay": "edge_run.base.replay",
    "replay": "edge_run.prefetch.replay",
    "trace": "edge_run.runtime.tools.tracing",
    "ModelConfig": "edge_run.base.config",
    "SamplingConfig": "edge_run.base.sampling_config",
    **dict.fromkeys(
        ("Forecast", "Generation", "Piece", "Plan", "Progress", "Stats", "to_json"), "edge_run.base.results"
    ),
    **dict.fromkeys(
        ("BudgetError", "Cancelled", "ConfigError", "ContextFull", "EdgeRunError", "KernelError", "ModelFileError"),
        "edge_run.base.errors",
    ),
    **dict.fromkeys(
        ("DeviceLost", "MeshError", "NotSupported", "NotTrusted", "PackedFileError", "ProtocolError", "TierReadError"),
        "edge_run.base.errors",
    ),
}

__all__ = [
    "AsyncModel",
    "AsyncSplitModel",
    "BudgetError",
    "Cancelled",
    "ConfigError",
    "ContextFull",
    "DeviceLost",
    "DeviceProfile",
    "EdgeRunError",
    "Embeddings",
    "Forecast",
    "Generation",
    "KernelError",
    "MeshError",
    "Model",
    "ModelConfig",
    "ModelFileError",
    "NotSupported",
    "NotTrusted",
    "PackedFileError",
    "Piece",
    "Plan",
    "Progress",
    "ProtocolError",
    "Recording",
    "Replay",
    "Request",
    "SamplingConfig",
    "SplitModel",
    "Stats",
    "TierReadError",
    "Turn",
    "__version__",
    "inflate",
    "plan",
    "probe",
    "replay",
    "to_json",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'edge_run' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
