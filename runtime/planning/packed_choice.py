"""Whether a run reads experts from a packed file."""

from __future__ import annotations

import logging

from edge_run.base.config import PACKED_OFF, ModelConfig
from edge_run.base.errors import NotSupported
from edge_run.base.extras import PACK, need
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.packed_file import PackedFile, find_packed

logger = logging.getLogger(__name__)


def choose_packed(gguf: GgufModel, config: ModelConfig) -> PackedFile | None:
    """Return the packed file of `gguf` that `config` names, or the one beside the model; None for neither, or `off`.

    Raises PackedFileError where the file is damaged or another model's, ModelFileError; NotSupported where the user
    named a file and zstandard is missing.
    """
    if config.packed == PACKED_OFF:
        return None
    packed = find_packed(gguf, config.packed_file)
    if packed is None:
        return None
    try:
        need("zstandard", PACK)
    except NotSupported as error:
        if config.packed_file:
            raise
        logger.warning("%s: left alone: %s", packed.path, error)
        return None
    return packed
