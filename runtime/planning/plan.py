"""From a file to its plan: what `edge_run.plan` and `edge-run plan` ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig, make_config
from edge_run.base.errors import ConfigError, NotSupported, system_errors
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import default_budget_bytes
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.runtime.inspection.model_kind import check_kind
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.speculation_shape import speculation_config
from edge_run.tiers._libc import why_unavailable
from edge_run.tiers.gguf import read_gguf


def planner(path: Path, config: ModelConfig) -> Planner:
    """Return the planner of the model at `path`; its header is read, no weights are.

    Raises ModelFileError, ConfigError, NotSupported, KernelError or TierReadError.
    """
    if reason := why_unavailable():
        raise NotSupported(
            f"{path}: no plan, as only llama.cpp's own loader, which keeps no budget, runs here: {reason}"
        )
    gguf = read_gguf(path)
    check_kind(gguf)
    check_kv_types(gguf, config)
    config = speculation_config(config, gguf)
    draft_file = DraftFile(config.draft_model, config, gguf) if config.draft_model else None
    known = inspect(gguf, config, library_version(), is_tried=False)
    if config.gpu_memory == 0:
        return Planner(gguf, config, known, draft_file.size_bytes if draft_file else 0)
    from edge_run.runtime.gpu.offload import draft_host_bytes, plan_offload  # and with it llama.cpp, which takes long
    from edge_run.runtime.planning.offload_times import OffloadTimes

    memory_bytes = int(config.memory or default_budget_bytes(Ledger().promised_bytes))
    times = OffloadTimes(gguf, config, known, memory_bytes, draft_host_bytes(draft_file, None))
    offload, draft = plan_offload(gguf, config, memory_bytes, draft_file, times.token_s)
    return Planner(gguf, config, known, draft_host_bytes(draft_file, draft), offload)


@system_errors("planning")
def plan(
    path: str | Path,
    *,
    memory: int | str | None = None,
    prompt_tokens: int = 512,
    profile: DeviceProfile | None = None,
    config: ModelConfig | None = None,
    **options: Any,
) -> Plan:
    """Return what `Model(path, ...)` would do, from the same arguments; no weights are read.

    profile: of the device (`probe`); with one, the plan's `forecast` says how long a prompt of `prompt_tokens` tokens
    and each token after it would take. Raises like `Model`, but reads nothing and allocates nothing.
    """
    if config is not None and (options or memory is not None):
        raise ConfigError("config and single options: give one of the two")
    planned = planner(Path(path), config or make_config(ModelConfig, {"memory": memory, **options}))
    decided = planned.plan()
    return planned.timed(decided, profile, Path(path), prompt_tokens) if profile else decided
