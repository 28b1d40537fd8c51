"""Which loader runs a model: ours, or llama.cpp's own where ours cannot, or is not asked for."""

from __future__ import annotations

from edge_run.base.config import ModelConfig
from edge_run.base.errors import NotSupported
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc


def why_not_ours(config: ModelConfig) -> str:
    """Return why llama.cpp's own loader has to run the model, or an empty string when ours can. Raises NotSupported."""
    if config.backend == "llama.cpp":
        return "asked for with --backend llama.cpp"
    reason = ggml.check_library() or _libc.why_unavailable()
    if reason and config.backend == "edge-run":
        raise NotSupported(f"backend edge-run: {reason}; --backend auto runs the model with llama.cpp's own loader")
    return reason
