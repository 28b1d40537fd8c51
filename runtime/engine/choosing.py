"""Whether attention looks at a part of the context: by the model's own choice, or by ours (`--kv-keep`)."""

from __future__ import annotations

from edge_run.base.errors import NotSupported
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.graph.nodes import ATTENTION, GraphMap
from edge_run.runtime.streaming.chosen_rows import ChosenRows
from edge_run.runtime.streaming.visible_rows import INDEXER, VisibleRows


def chooser_of(loaded: Loaded, graph: GraphMap, *, is_spilled: bool) -> ChosenRows | VisibleRows | None:
    """Return what chooses rows: what the configuration asks for, or of spilled cells also the model itself.

    is_spilled: cells may be in a file; then whoever brings them is to ask, and brings those rows only. None where all
    rows are looked at. Raises NotSupported.
    """
    config, path = loaded.prepared.config, loaded.prepared.gguf.shards[0].path
    chooses_itself = bool(loaded.prepared.gguf.value(INDEXER))
    if not config.kv_keep:
        return VisibleRows() if chooses_itself and is_spilled else None
    if not any(node.op == ATTENTION for node in graph):
        raise NotSupported(f"{path}: kv keep needs flash attention, which llama.cpp does not use for this model")
    if loaded.model.sliding_window_tokens:
        raise NotSupported(f"{path}: kv keep is for models without sliding windows, which look at a part already")
    if chooses_itself:
        raise NotSupported(f"{path}: kv keep is not for a model that chooses among its rows itself")
    return ChosenRows(config.kv_keep, config.kv_keep_by, is_asked=is_spilled)
