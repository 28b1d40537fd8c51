"""The terms of a plan whose weights are repacked: which they are, and what it takes to repack them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.repackable import is_by_expert, repackable
from edge_run.runtime.llama.holdings import repacking_bytes
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.packed_file import PackedFile


def with_repacking(terms: Terms, graph: GraphMap, wanted: Collection[str], file: PackedFile | None = None) -> Terms:
    """Return `terms` of a run that repacks those of the `wanted` kinds of weights that have a kernel for it.

    graph: of a pass. file: holds some of them repacked, and is read where all of these are wanted.
    """
    if not wanted:
        return terms
    from edge_run.runtime.llama.repacking import groups_of  # and with it llama.cpp, which takes long to load

    found = {kind: tensors for kind, tensors in repackable(graph, terms.gguf).items() if kind in wanted}
    weights = {(t.type_id, t.shape, is_by_expert(kind)): kind for kind, tensors in found.items() for t in tensors}
    groups = groups_of(weights)
    room_bytes = terms.readers * repacking_bytes(max(groups.values(), default=0))
    kinds = {weights[weight] for weight in groups}
    names = {tensor.name for kind in kinds for tensor in found[kind]}
    if file and names.issuperset(file.facts.names):
        terms, room_bytes = replace(terms, is_read_repacked=True), room_bytes + file.memory_bytes(0)
    holdings = replace(terms.holdings, repacking_bytes=room_bytes)
    return replace(terms, holdings=holdings, repacked=tuple(sorted(kinds)))
