"""Run models that do not fit the device: `Model("model.gguf", memory="4GiB")`, text as llama.cpp would give it.

The public names are imported when they are first used: `import edge_run` alone loads neither llama.cpp nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_run.base.config import ModelConfig, ModelOptions
    from edge_run.base.errors import (
        BudgetError,
        Cancelled,
        ConfigError,
        ContextFull,
        DeviceLost,
        EdgeRunError,
        KernelError,
        LogitsError,
        MeshError,
        ModelFileError,
        ModelFileMissing,
        NotSupported,
        NotTrusted,
        PackedFileError,
        ProtocolError,
        TierReadError,
    )
    from edge_run.base.interrupt import Interrupt
    from edge_run.base.mesh import MeshOptions
    from edge_run.base.mesh_status import MeshUse
    from edge_run.base.profile import DeviceProfile
    from edge_run.base.protocols import Text
    from edge_run.base.replay import Recording, Replay
    from edge_run.base.results import (
        Forecast,
        Generation,
        IoUse,
        MemoryUse,
        Numerics,
        Piece,
        Plan,
        Progress,
        Speculation,
        Stats,
        ToolCall,
    )
    from edge_run.base.sampling_config import (
        AnswerOptions,
        ChatOptions,
        SamplingConfig,
        TimedAnswerOptions,
        TimedChatOptions,
    )
    from edge_run.base.strict_json import to_json
    from edge_run.devices.mesh.opening import MeshConfig, open_mesh
    from edge_run.prefetch.replay import replay
    from edge_run.runtime.embedding.results import Embeddings, EmbeddingShape, TextVectors
    from edge_run.runtime.embedding.texts import TextTokens
    from edge_run.runtime.generation.async_model import AsyncModel
    from edge_run.runtime.generation.async_stream import AsyncStream
    from edge_run.runtime.generation.batch import Batch
    from edge_run.runtime.generation.batched_answers import Event
    from edge_run.runtime.generation.continuation import Continuation
    from edge_run.runtime.generation.many import ManyStream
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.request import Message, Prompt, Request, Turn
    from edge_run.runtime.generation.stream import Stream
    from edge_run.runtime.grammars.room import RoomedGrammar
    from edge_run.runtime.keeping.keeper import ConversationRows
    from edge_run.runtime.llama.prompt_text import GapMarks
    from edge_run.runtime.planning.plan import plan
    from edge_run.runtime.probing.probe import probe
    from edge_run.runtime.split.async_model import AsyncSplitModel
    from edge_run.runtime.split.model import Frame, SplitModel
    from edge_run.runtime.tools.inflate import inflate
    from edge_run.runtime.tools.pack import Packed, pack
    from edge_run.runtime.tools.tracing import trace

__version__ = "0.1.0"

_NAMES = {
    "edge_run.base.config": (
        "ModelConfig",
        "ModelOptions",
    ),
    "edge_run.base.errors": (
        "BudgetError",
        "Cancelled",
        "ConfigError",
        "ContextFull",
        "DeviceLost",
        "EdgeRunError",
        "KernelError",
        "LogitsError",
        "MeshError",
        "ModelFileError",
        "ModelFileMissing",
        "NotSupported",
        "NotTrusted",
        "PackedFileError",
        "ProtocolError",
        "TierReadError",
    ),
    "edge_run.base.interrupt": ("Interrupt",),
    "edge_run.base.mesh": ("MeshOptions",),
    "edge_run.base.mesh_status": ("MeshUse",),
    "edge_run.base.profile": ("DeviceProfile",),
    "edge_run.base.protocols": ("Text",),
    "edge_run.base.replay": (
        "Recording",
        "Replay",
    ),
    "edge_run.base.results": (
        "Forecast",
        "Generation",
        "IoUse",
        "MemoryUse",
        "Numerics",
        "Piece",
        "Plan",
        "Progress",
        "Speculation",
        "Stats",
        "ToolCall",
    ),
    "edge_run.base.sampling_config": (
        "AnswerOptions",
        "ChatOptions",
        "SamplingConfig",
        "TimedAnswerOptions",
        "TimedChatOptions",
    ),
    "edge_run.base.strict_json": ("to_json",),
    "edge_run.devices.mesh.opening": (
        "MeshConfig",
        "open_mesh",
    ),
    "edge_run.prefetch.replay": ("replay",),
    "edge_run.runtime.embedding.results": (
        "EmbeddingShape",
        "Embeddings",
        "TextVectors",
    ),
    "edge_run.runtime.embedding.texts": ("TextTokens",),
    "edge_run.runtime.generation.async_model": ("AsyncModel",),
    "edge_run.runtime.generation.async_stream": ("AsyncStream",),
    "edge_run.runtime.generation.batch": ("Batch",),
    "edge_run.runtime.generation.batched_answers": ("Event",),
    "edge_run.runtime.generation.continuation": ("Continuation",),
    "edge_run.runtime.generation.many": ("ManyStream",),
    "edge_run.runtime.generation.model": ("Model",),
    "edge_run.runtime.generation.request": (
        "Message",
        "Prompt",
        "Request",
        "Turn",
    ),
    "edge_run.runtime.generation.stream": ("Stream",),
    "edge_run.runtime.grammars.room": ("RoomedGrammar",),
    "edge_run.runtime.keeping.keeper": ("ConversationRows",),
    "edge_run.runtime.llama.prompt_text": ("GapMarks",),
    "edge_run.runtime.planning.plan": ("plan",),
    "edge_run.runtime.probing.probe": ("probe",),
    "edge_run.runtime.split.async_model": ("AsyncSplitModel",),
    "edge_run.runtime.split.model": (
        "Frame",
        "SplitModel",
    ),
    "edge_run.runtime.tools.inflate": ("inflate",),
    "edge_run.runtime.tools.pack": (
        "Packed",
        "pack",
    ),
    "edge_run.runtime.tools.tracing": ("trace",),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "AnswerOptions",
    "AsyncModel",
    "AsyncSplitModel",
    "AsyncStream",
    "Batch",
    "BudgetError",
    "Cancelled",
    "ChatOptions",
    "ConfigError",
    "ContextFull",
    "Continuation",
    "ConversationRows",
    "DeviceLost",
    "DeviceProfile",
    "EdgeRunError",
    "EmbeddingShape",
    "Embeddings",
    "Event",
    "Forecast",
    "Frame",
    "GapMarks",
    "Generation",
    "Interrupt",
    "IoUse",
    "KernelError",
    "LogitsError",
    "ManyStream",
    "MemoryUse",
    "MeshConfig",
    "MeshError",
    "MeshOptions",
    "MeshUse",
    "Message",
    "Model",
    "ModelConfig",
    "ModelFileError",
    "ModelFileMissing",
    "ModelOptions",
    "NotSupported",
    "NotTrusted",
    "Numerics",
    "Packed",
    "PackedFileError",
    "Piece",
    "Plan",
    "Progress",
    "Prompt",
    "ProtocolError",
    "Recording",
    "Replay",
    "Request",
    "RoomedGrammar",
    "SamplingConfig",
    "Speculation",
    "SplitModel",
    "Stats",
    "Stream",
    "Text",
    "TextTokens",
    "TextVectors",
    "TierReadError",
    "TimedAnswerOptions",
    "TimedChatOptions",
    "ToolCall",
    "Turn",
    "__version__",
    "inflate",
    "open_mesh",
    "pack",
    "plan",
    "probe",
    "replay",
    "to_json",
    "trace",
]


if not TYPE_CHECKING:  # to type checkers each name that is misspelled would be one

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'edge_run' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
