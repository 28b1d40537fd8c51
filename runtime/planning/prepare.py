"""What is known of a model before it is opened: what llama.cpp would do with it, and what of it a GPU gets.

A file that llama.cpp would end the process over is refused first, then budgets that are too small.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.profile import DeviceProfile
from edge_run.devices.host.memory import available_bytes
from edge_run.runtime.gpu.offload import Offload, Offloads, draft_host_bytes, plan_offload
from edge_run.runtime.inspection.cache import Inspection, inspect
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.inspection.launcher import NoInspector
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.planning.offload_times import OffloadTimes
from edge_run.runtime.planning.planner import Planner
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """planner: None where the file was not looked at. offload, draft_offload: what a GPU gets of either model.

    profile: of this device, where what a GPU gets was decided by it.
    """

    planner: Planner | None = None
    offload: Offload | None = None
    draft_offload: Offload | None = None
    profile: DeviceProfile | None = None


def prepare(
    gguf: GgufModel, config: ModelConfig, draft: DraftFile | None, budget_bytes: int, *, may_offload: bool
) -> Prepared:
    """Return what is known of a model, and of its draft model, under a budget.

    Raises ModelFileError and what `plan_offload` does.
    """
    if ggml.check_library():  # not the llama.cpp that we know: what it does cannot be said
        return Prepared()
    known = _inspect(gguf, config) if config.check_file else None
    if known is None:
        parts = plan_offload(gguf, config, budget_bytes, draft) if may_offload else Offloads()
        return Prepared(None, parts.model, parts.draft)
    times = OffloadTimes(gguf, config, known, budget_bytes, draft_host_bytes(draft, None))
    parts = plan_offload(gguf, config, budget_bytes, draft, times.token_s) if may_offload else Offloads()
    planner = Planner(gguf, config, known, draft_host_bytes(draft, parts.draft), parts.model)
    return Prepared(planner, parts.model, parts.draft, times.profile)


def check_budget(planner: Planner, budget_bytes: int, promised_bytes: Callable[[Path | None], int]) -> None:
    """Refuse a budget that is too small already for opening the model. promised_bytes: see `available_bytes`.

    Raises BudgetError.
    """
    room = min(budget_bytes, available_bytes(promised_bytes=promised_bytes))
    if planner.opening_bytes > room:
        planner.plan(room)


def _inspect(gguf: GgufModel, config: ModelConfig) -> Inspection | None:
    if _libc.why_unavailable():
        return None
    try:
        return inspect(gguf, config, library_version())
    except NoInspector as error:
        logger.warning("%s; it is opened all the same", error)
        return None
