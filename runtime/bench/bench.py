"""A prediction, put to the test: cold runs of a model in processes of their own, with llama.cpp's mmap in between.

The prediction is made first, from the plan and the device's profile. Then edge-run and llama.cpp run in turn, both with
no more memory than the budget where a memory group can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge_run.base.bench import BACKEND_NAMES, MMAP, OURS, Bench, Measurement, MemoryBox
from edge_run.base.closing import Closing
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ContextFull
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Plan
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.machine import describe_machine
from edge_run.devices.host.memory import default_budget_bytes
from edge_run.devices.host.profile import ProfileStore, utc_now
from edge_run.devices.host.scratch import NoScratchError
from edge_run.runtime.bench.cold_run import ColdRuns, OutOfMemory, read_ahead_bytes
from edge_run.runtime.bench.comparison import compare, same_tokens
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.planning.plan import planner
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.probing.probe import probe

Step = Callable[[str], None]

_STRIDE = 7919  # a prime: the prompt's tokens are spread over the vocabulary


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure. The prompt's tokens are arbitrary, and always the same for a vocabulary."""

    prompt_tokens: int = 64
    predict_tokens: int = 8
    rounds: int = 2
    has_mmap: bool = True


class Bencher(Closing):
    """Predicts, then measures. A context manager; `close` ends a running measurement and leaves nothing.

    on_step is told what runs, every half second.
    """

    def __init__(self, path: Path, config: ModelConfig, task: Task, on_step: Step = lambda text: None) -> None:
        self._path, self._task, self._on_step = path, task, on_step
        budget = int(config.memory or default_budget_bytes(Ledger().promised_bytes))
        self._config = replace(config, memory=budget, gpu_memory=0, backend="auto")  # mmap is compared on the processor
        self._store = ProfileStore(config.cache)
        self._runs: ColdRuns | None = None

    def run(self, profile: DeviceProfile | None = None) -> Bench:
        """Return the comparison. profile: None is this device's, measured where it is not known.

        Raises what opening the model raises, ContextFull for a prompt that is too long, and BudgetError where edge-run
        itself was ended for want of memory.
        """
        started_at = utc_now().isoformat(timespec="seconds")
        planner(self._path, self._config)  # what cannot be opened is refused before anything is measured
        profile = profile or self._profile()
        planned = planner(self._path, self._config)  # what was measured may decide how wide passes are, and the context
        self._check_context(planned.known.context_tokens)
        self._config = planned.config  # of all runs: they decide nothing anew
        plan = planned.timed(planned.plan(), profile, self._task.prompt_tokens)
        self._runs = runs = ColdRuns([shard.path for shard in planned.gguf.shards], plan.budget_bytes)
        measurements, problem = self._measure(runs, planned, plan)
        limit_bytes = 0 if runs.group.reason else plan.budget_bytes
        has_both = len({measurement.backend for measurement in measurements}) > 1
        machine = describe_machine()
        return Bench(
            model=self._path.name,
            started_at=started_at,
            cpu=machine.cpu,
            cores=machine.cores.at_once,
            library=library_version(),
            numerics=measurements[0].numerics,
            prompt_tokens=self._task.prompt_tokens,
            predict_tokens=self._task.predict_tokens,
            rounds=self._task.rounds,
            plan=plan,
            profiled_at=profile.measured_at if profile else "",
            profile_problem=self._store.problem,
            box=MemoryBox(limit_bytes, runs.group.reason, read_ahead_bytes(self._path)),
            measurements=measurements,
            comparisons=compare(plan, measurements),
            has_same_tokens=same_tokens(measurements) if has_both else None,
            mmap_problem=problem,
        )

    def close(self) -> None:
        """End what runs, and leave nothing. Idempotent."""
        if self._runs is not None:
            self._runs.close()

    def _profile(self) -> DeviceProfile | None:
        """Return what this device can do; None where its disk cannot be measured, which is a problem of the profile."""
        folder, store, step = self._path.absolute().parent, self._store, self._on_step
        try:
            return probe([folder], self._path, self._config, on_step=step, store=store, measures_gpus=False)
        except NoScratchError as error:
            store.problem = str(error)
            return None

    def _check_context(self, context_tokens: int) -> None:
        needed = self._task.prompt_tokens + self._task.predict_tokens
        if needed > context_tokens:
            raise ContextFull(
                f"{self._path}: a prompt of {self._task.prompt_tokens} tokens and {self._task.predict_tokens} more do "
                f"not fit the context of {context_tokens}; give more with -c, or shorten them (--prompt-tokens, -n)",
                needed_tokens=needed,
                context_tokens=context_tokens,
            )

    def _measure(self, runs: ColdRuns, planned: Planner, plan: Plan) -> tuple[tuple[Measurement, ...], str]:
        """Return the measurements in their order, and why mmap could not be measured to the end."""
        prompt = arbitrary_tokens(self._task.prompt_tokens, planned.known.vocabulary)
        measurements, problem = [], ""
        for number in range(self._task.rounds):
            for backend in (OURS, MMAP) if self._task.has_mmap and not problem else (OURS,):
                config = replace(self._config, backend=backend, check_file=False)
                tick = self._tick(number, backend, plan)
                try:
                    measurements.append(runs.run(config, prompt, self._task.predict_tokens, tick))
                except OutOfMemory as ended:
                    if backend == OURS:
                        raise ended.of_ours() from None
                    problem = str(ended)
        return tuple(measurements), problem

    def _tick(self, number: int, backend: str, plan: Plan) -> Callable[[float], None]:
        """Return what tells that a measurement goes on, and how long it may take."""
        what, about = f"Round {number + 1} of {self._task.rounds}: {BACKEND_NAMES[backend]}", ""
        if (forecast := plan.forecast) is not None and forecast.decode_tokens_per_s and backend == OURS:
            decode_s = (self._task.predict_tokens - 1) / forecast.decode_tokens_per_s
            about = f" of about {forecast.load_s + forecast.first_token_s + decode_s:.0f}"
        return lambda elapsed_s: self._on_step(f"{what}, {elapsed_s:.0f}{about} s (Ctrl-C stops)")


def arbitrary_tokens(count: int, vocabulary: int) -> list[int]:
    """Return `count` tokens from all over a vocabulary, always the same."""
    return [_STRIDE * (i + 1) % vocabulary for i in range(count)]
