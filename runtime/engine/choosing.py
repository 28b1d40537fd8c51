"""Whether attention looks at a part of the context: by the model's own choice, or by ours (`--kv-keep`)."""

from __future__ import annotations

from edge_run.base.errors import NotSupported
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.streaming.chosen_rows import ATTENTION, ChosenRows
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.runtime.streaming.visible_rows import INDEXER, VisibleRows


def choosing(loaded: Loaded, graph: GraphMap, spilled: SpilledCells | None) -> list[ChosenRows]:
    """Return the feature that chooses rows, where the configuration asks for one. Raises NotSupported.

    spilled: asks it then, and brings those rows only; also those that a model chooses itself.
    """
    config, path = loaded.prepared.config, loaded.prepared.gguf.shards[0].path
    chooses_itself = bool(loaded.prepared.gguf.value(INDEXER))
    if chooses_itself and spilled:
        spilled.chooser = VisibleRows()
    if not config.kv_keep:
        return []
    if not any(node.op == ATTENTION for node in graph):
        raise NotSupported(f"{path}: --kv-keep needs flash attention, which llama.cpp does not use for this model")
    if loaded.model.sliding_window_tokens:
        raise NotSupported(f"{path}: --kv-keep is for models without sliding windows, which look at a part already")
    if chooses_itself:
        raise NotSupported(f"{path}: --kv-keep is not for a model that chooses among its rows itself")
    chosen = ChosenRows(config.kv_keep, config.kv_keep_by, is_asked=spilled is not None)
    if spilled:
        spilled.chooser = chosen
    return [chosen]
