"""Opens the file for keys and values that have no room in memory, and has passes bring them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from edge_run.base.errors import NotSupported
from edge_run.devices.host.mount import IN_MEMORY, find_mount
from edge_run.runtime.decoding.narrow_pass import NarrowPass
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.graph.cell_uses import cell_uses, with_cells
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.observer import Observer
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers.kv.spill import Spill
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.readers import Readers


def spillable_uses(loaded: Loaded, narrow: NarrowPass) -> list[tuple[int, ...]]:
    """Return, of what each attention reads, the tensors that lie as rows in memory that may come and go."""
    ranges, cells = loaded.context.sparse_caches, narrow.flow.cells

    def is_inside(number: int) -> bool:
        tensor = cells[number]
        return any(at <= tensor.address + tensor.row_bytes // 2 < at + length for at, length in ranges)

    return [tuple(filter(is_inside, use)) for use in cell_uses(narrow.graph, narrow.flow)]


def open_spill(
    loaded: Loaded, terms: Terms, narrow: NarrowPass, readers: Readers, stack: contextlib.ExitStack
) -> tuple[SpilledCells, GraphMap]:
    """Make the file, as the plan with `terms` says; return the feature, and the graph of a pass of one token.

    Raises TierReadError where the folder takes no file, NotSupported where that would be in memory.
    """
    assert terms.spill
    driver, context, config = loaded.driver, loaded.context, loaded.prepared.config
    file = SpillFile(config.spill_folder)
    stack.callback(file.close)
    stack.callback(readers.close)  # before the file that they read
    with contextlib.suppress(OSError):  # where it is cannot be told
        _check_folder(config.spill_folder)
    room_bytes = terms.cell_bytes(terms.context_tokens)
    spill = Spill(terms.spill, context.sparse_caches, room_bytes, file, readers, driver.interrupt.check)
    addresses = frozenset(spill.numbers)
    driver.observer = Observer(cells=addresses)
    return SpilledCells(spill, terms.spill.attentions), with_cells(narrow.graph, narrow.flow, addresses)


def _check_folder(folder: Path) -> None:
    """Raise NotSupported where files in `folder` take memory."""
    if (system := find_mount(folder).file_system) in IN_MEMORY:
        raise NotSupported(
            f"kv spill: {folder} is in memory ({system}), so that nothing is gained there; name a folder on a drive "
            "with --kv-spill"
        )
