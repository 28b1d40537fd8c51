"""Opens the file for keys and values that have no room in memory, and has passes bring them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from edge_run.base.errors import NotSupported, option
from edge_run.devices.host.mount import IN_MEMORY, find_mount
from edge_run.runtime.engine.loading import Loaded
from edge_run.runtime.graph.cell_uses import cell_uses
from edge_run.runtime.graph.flow import Flow
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.graph.observer import Observer
from edge_run.runtime.planning.terms import Terms
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.kv.spill import Spill
from edge_run.tiers.kv.spill_file import SpillFile
from edge_run.tiers.readers import Readers


def spillable_uses(loaded: Loaded, graph: GraphMap, flow: Flow, cells: Sequence[CellTensor]) -> list[tuple[int, ...]]:
    """Return, of what each attention of `graph` reads, which of `cells` lie as rows in memory that may come and go.

    flow: that of `graph`. The result has their numbers.
    """
    ranges = loaded.context.sparse_caches

    def is_inside(tensor: CellTensor) -> bool:
        middle = tensor.address + tensor.row_bytes // 2
        return any(at <= middle < at + length for at, length in ranges)

    numbers = {tensor.address: number for number, tensor in enumerate(cells) if is_inside(tensor)}
    addresses = (tuple(flow.cells[number].address for number in use) for use in cell_uses(graph, flow))
    uses = (tuple(numbers[address] for address in use if address in numbers) for use in addresses)
    return [use for use in uses if use]


def open_spill(loaded: Loaded, terms: Terms, readers: Readers, stack: contextlib.ExitStack) -> SpilledCells:
    """Make the file, as the plan with `terms` says; return the feature. `stack` closes it, and `readers` first.

    Raises TierReadError where the folder takes no file, NotSupported where that would be in memory.
    """
    assert terms.spill
    driver, context, config = loaded.driver, loaded.context, loaded.prepared.config
    file = SpillFile(config.spill_folder)
    stack.callback(file.close)
    with contextlib.suppress(OSError):  # where it is cannot be told
        _check_folder(config.spill_folder)
    room_bytes = terms.held_cell_bytes(terms.context_tokens)
    spill = Spill(terms.spill, context.sparse_caches, room_bytes, file, readers, driver.interrupt.check)
    stack.callback(spill.release)
    stack.callback(readers.close)  # before what they read, and read to
    spilled = SpilledCells(spill, terms.spill.attentions)
    driver.observer = Observer(cells=spilled.addresses)
    return spilled


def _check_folder(folder: Path) -> None:
    """Raise NotSupported where files in `folder` take memory."""
    if (system := find_mount(folder).file_system) in IN_MEMORY:
        raise NotSupported(
            f"kv spill: {folder} is in memory ({system}), so that nothing is gained there; name a folder on a drive "
            f"with {option('kv_spill')}"
        )
