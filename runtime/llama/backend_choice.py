"""Which loader runs a model: ours, or llama.cpp's own where ours cannot, or is not asked for."""

from __future__ import annotations

from edge_run.base.config import ModelConfig
from edge_run.base.errors import NotSupported, option
from edge_run.tiers import _libc


def why_not_ours(config: ModelConfig, *, is_loaded: bool = True) -> str:
    """Return why llama.cpp's own loader has to run the model, or an empty string when ours can. Raises NotSupported.

    is_loaded: llama.cpp is looked at, which loads it; else only what was asked for counts.
    """
    if config.backend == "llama.cpp":
        return f"asked for with {option('backend', 'llama.cpp')}"
    reason = (_why_unknown() or _libc.why_unavailable()) if is_loaded else ""
    if reason and config.backend == "edge-run":
        other = option("backend", "auto")
        raise NotSupported(f"backend edge-run: {reason}; {other} runs the model with llama.cpp's own loader")
    return reason


def check_backend(config: ModelConfig) -> None:
    """Raise NotSupported for what is asked of a model that llama.cpp's own loader has to run, and that needs ours.

    Of a llama.cpp that we do not know, nothing in its memory is looked at, and nothing is written there.
    """
    if reason := why_not_ours(config):
        for is_asked, name in ((config.kv_keep, "kv_keep"), (config.spills_kv, "kv_spill")):
            if is_asked:
                what = name.replace("_", " ")
                raise NotSupported(f"{what}: llama.cpp's own loader runs the model: {reason}; leave out {option(name)}")
    if config.exact:
        check_library_known("exact")
    if config.draft_model:
        check_library_known(f"a draft model ({option('draft')})")


def check_library_known(what: str) -> None:
    """Raise NotSupported, as `what` looks into the memory of llama.cpp, where that is none that we know."""
    if reason := _why_unknown():
        raise NotSupported(f"{what}: not with this llama.cpp: {reason}, or leave it out")


def is_library_known() -> bool:
    """Return whether the installed llama.cpp is one that we know."""
    return not _why_unknown()


def _why_unknown() -> str:
    from edge_run.runtime.llama import _ggml as ggml  # which takes long to load

    return ggml.check_library()
