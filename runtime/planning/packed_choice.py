"""Whether a run reads experts, or repacked weights, from a packed file."""

from __future__ import annotations

import logging

from edge_run.base.config import PACKED_OFF, ModelConfig
from edge_run.base.errors import NotSupported, PackedFileError
from edge_run.base.extras import PACK, need
from edge_run.runtime.graph.repackable import described, tensors_of
from edge_run.tiers._libc import PAGE
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.packed_file import PackedFile, find_packed, packed_anew

logger = logging.getLogger(__name__)


def choose_packed(gguf: GgufModel, config: ModelConfig) -> PackedFile | None:
    """Return the packed experts of `gguf` that `config` names, or those beside the model; None for neither, or `off`.

    Raises PackedFileError where the file is damaged or another model's, ModelFileError; NotSupported where the user
    named a file and zstandard is missing.
    """
    if config.packed == PACKED_OFF:
        return None
    packed = find_packed(gguf, config.packed_file)
    if packed is None or packed.facts.is_repacked:
        return None
    try:
        need("zstandard", PACK)
    except NotSupported as error:
        if config.packed_file:
            raise
        logger.warning("%s: left alone: %s", packed.path, error)
        return None
    return packed


def choose_repacked_file(gguf: GgufModel, config: ModelConfig) -> PackedFile | None:
    """Return the packed file of `gguf`, as above, where its weights are repacked for the kernels of this processor.

    Raises PackedFileError where the file is damaged or another model's, or was named and is for other kernels or
    smaller pages; ModelFileError.
    """
    if config.packed == PACKED_OFF:
        return None
    packed = find_packed(gguf, config.packed_file)
    if packed is None or not packed.facts.is_repacked:
        return None
    if not (problem := _why_not_here(packed, gguf)):
        return packed
    problem = f"{packed.path}: {problem}; {packed_anew()}"
    if packed.is_named:
        raise PackedFileError(problem)
    logger.warning("%s", problem)
    return None


def _why_not_here(packed: PackedFile, gguf: GgufModel) -> str:
    """Return why weights that are repacked cannot be read on this machine; "" where they can."""
    if packed.alignment_bytes % PAGE:
        return f"was packed where pages have {packed.alignment_bytes:,} bytes, and has no use where they have {PAGE:,}"
    from edge_run.runtime.llama.repacking import layout_of  # and with it llama.cpp, which takes long to load

    if layout_of(described(tensors_of(gguf, packed.facts.names))) != packed.facts.layout:
        return "its weights are repacked for the kernels of another processor, or of another llama.cpp"
    return ""
