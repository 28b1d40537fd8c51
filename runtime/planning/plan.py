"""From a file to its plan, for `edge_run.plan` and `edge-run plan`."""

from __future__ import annotations

from pathlib import Path

from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.errors import system_errors
from edge_run.base.options import Unpack, config_of
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.runtime.planning.planner import Planner, told
from edge_run.runtime.planning.prepare import prepare
from edge_run.tiers.gguf import read_gguf


def planner(path: Path, config: ModelConfig, *, may_measure: bool = True) -> Planner:
    """Return the planner of the model at `path`. may_measure: as of `prepare`, which this raises as for a plan."""
    return Planner(prepare(read_gguf(path), config, is_opened=False, may_measure=may_measure))


@system_errors("planning")
def plan(
    path: str | Path,
    *,
    prompt_tokens: int | None = None,
    profile: DeviceProfile | None = None,
    config: ModelConfig | None = None,
    **options: Unpack[ModelOptions],
) -> Plan:
    """Return the plan of `Model(path, ...)` with the same arguments, but `chat_template` and `mesh`.

    profile: the profile of the device (`probe`). With one, the plan has a `forecast`: the times of a prompt of
        `prompt_tokens` tokens, and of each token after it.
    prompt_tokens: None are 512, or as many as the context has room for.

    No weights are read, and no memory is taken for them: a child process builds the graph, and what it found is kept in
    the cache folder. Raises like `Model`; ContextFull for a prompt that does not fit the context.
    """
    config = config_of(ModelConfig, config, options, ("prompt_tokens", "profile", "config"))
    planned = planner(Path(path), config)
    return planned.timed(told(planned), profile, prompt_tokens)
