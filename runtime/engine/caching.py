"""The page cache and a model that fits: what is cached is read from there, and stays for the next start.

A second start then reads nothing from the drive. What stays is no memory of this run: the kernel takes it back before
anybody goes short. It counts in the control group of the run all the same, so there must be room for it there besides
all that the run will hold. A streamed run never uses the page cache: it would fill it with each pass.
"""

from __future__ import annotations

import logging

from edge_run.base.results import Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import MARGIN_BYTES, available_bytes
from edge_run.runtime.engine.loading import Loaded, WeightBacking
from edge_run.tiers.drives.cached_start import PIECE_BYTES, CachedStart

logger = logging.getLogger(__name__)


def use_page_cache(loaded: Loaded, backing: WeightBacking, plan: Plan, ledger: Ledger) -> None:
    """Have the files of a model that is read as a whole read through the page cache, where that is wanted.

    plan: the run's, whose memory is not in `ledger` yet.
    """
    if loaded.prepared.config.page_cache == "off":
        return
    taken_bytes = sum(item.size_bytes for item in plan.items) + MARGIN_BYTES
    room_bytes = available_bytes(promised_bytes=ledger.promised_bytes) - taken_bytes
    keeps = room_bytes >= sum(source.size_bytes for source in backing.sources) and not backing.drives
    logger.info("beside this run there are %d bytes for the page cache; it keeps the model: %s", room_bytes, keeps)
    for source in backing.sources:
        source.use_page_cache(keeps=keeps)


def start_cached(backing: WeightBacking, plan: Plan) -> CachedStart:
    """Have what lies in the page cache serve from there at first, but repacked weights, which are no bytes of a file.

    plan: the run's, which must leave room for a copy at a time.
    """
    taken_bytes = sum(item.size_bytes for item in plan.items)
    is_for_us = not (backing.repacked or backing.drives) and taken_bytes + PIECE_BYTES <= plan.budget_bytes
    return CachedStart(backing.address_space, backing.sources, backing.chunks if is_for_us else ())
