"""Which loader runs a model: ours, or llama.cpp's own where ours cannot, or is not asked for."""

from __future__ import annotations

from edge_run.base.config import ModelConfig
from edge_run.base.errors import NotSupported
from edge_run.tiers import _libc


def why_not_ours(config: ModelConfig, *, is_loaded: bool = True) -> str:
    """Return why llama.cpp's own loader has to run the model, or an empty string when ours can. Raises NotSupported.

    is_loaded: llama.cpp is looked at, which loads it; else only what was asked for counts.
    """
    if config.backend == "llama.cpp":
        return "asked for with --backend llama.cpp"
    reason = (_why_unknown() or _libc.why_unavailable()) if is_loaded else ""
    if reason and config.backend == "edge-run":
        raise NotSupported(f"backend edge-run: {reason}; --backend auto runs the model with llama.cpp's own loader")
    return reason


def is_library_known() -> bool:
    """Return whether the installed llama.cpp is one that we know."""
    return not _why_unknown()


def _why_unknown() -> str:
    from edge_run.runtime.llama import _ggml as ggml  # which takes long to load

    return ggml.check_library()
