"""A prediction, put to the test: cold runs of a model in processes of their own, with llama.cpp's mmap in between.

The prediction is made first, from the plan and the device's profile. Then edge-run and llama.cpp run in turn, each with
the file's pages dropped from the page cache, and with no more memory than the budget where a memory group can be made.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType

from edge_run.base import errors
from edge_run.base.bench import MMAP, OURS, Bench, Measurement, MemoryBox, compare, same_tokens
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, ContextFull, KernelError
from edge_run.base.profile import DeviceProfile
from edge_run.base.results import Numerics, Plan
from edge_run.base.units import KIB, format_size
from edge_run.devices.ledger import Ledger
from edge_run.devices.memory import default_budget_bytes
from edge_run.devices.profile import utc_now
from edge_run.runtime.library import library_version
from edge_run.runtime.memory_group import OwnMemoryGroup
from edge_run.runtime.planner import Planner, planner
from edge_run.runtime.probe import probe

Step = Callable[[str], None]

TICK_S = 0.5
ENDING_S = 10.0
LAST_WORDS = 300
_STRIDE = 7919  # a prime: the prompt's tokens are spread over the vocabulary


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure. The prompt's tokens are arbitrary, and always the same for a vocabulary."""

    prompt_tokens: int = 64
    predict_tokens: int = 8
    rounds: int = 2
    has_mmap: bool = True


class _OutOfMemory(Exception):
    """The kernel ended a measurement: its memory group was full."""


class Bencher:
    """Predicts, then measures. A context manager; `close` ends a running measurement and removes its memory group.

    on_step is told what runs, every half second.
    """

    def __init__(self, path: Path, config: ModelConfig, task: Task, on_step: Step = lambda text: None) -> None:
        self._path, self._task, self._on_step = path, task, on_step
        budget = int(config.memory or default_budget_bytes(Ledger().promised_bytes))
        self._config = replace(config, memory=budget)
        self._child: subprocess.Popen[bytes] | None = None
        self._group: OwnMemoryGroup | None = None

    def run(self, profile: DeviceProfile | None = None) -> Bench:
        """Return the comparison. profile: None is this device's, measured where it is not known.

        Raises what opening the model raises, ContextFull for a prompt that is too long, and BudgetError where edge-run
        itself was ended for want of memory.
        """
        started_at = utc_now().isoformat(timespec="seconds")
        planned = planner(self._path, self._config)
        self._check_context(planned.known.context_tokens)
        if profile is None:
            profile = probe([self._path.absolute().parent], self._path, self._config, on_step=self._on_step)
        plan = planned.timed(planned.plan(), profile, self._path, self._task.prompt_tokens)
        shards = [shard.path for shard in planned.gguf.shards]
        measurements, problem, box = self._measure(planned, plan, shards)
        return Bench(
            model=self._path.name,
            started_at=started_at,
            cpu=profile.cpu,
            cores=profile.physical_cores,
            library=library_version(),
            numerics=measurements[0].numerics,
            prompt_tokens=self._task.prompt_tokens,
            predict_tokens=self._task.predict_tokens,
            rounds=self._task.rounds,
            plan=plan,
            profiled_at=profile.measured_at,
            box=box,
            measurements=tuple(measurements),
            comparisons=compare(plan, measurements),
            has_same_tokens=same_tokens(measurements) if {m.backend for m in measurements} >= {OURS, MMAP} else None,
            mmap_problem=problem,
        )

    def close(self) -> None:
        """End what runs, and leave nothing. Idempotent."""
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # without a limit, a signal handler could lock up here
                self._child.wait(ENDING_S)
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> Bencher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_context(self, context_tokens: int) -> None:
        needed = self._task.prompt_tokens + self._task.predict_tokens
        if needed > context_tokens:
            raise ContextFull(
                f"{self._path}: a prompt of {self._task.prompt_tokens} tokens and {self._task.predict_tokens} more do "
                f"not fit the context of {context_tokens}; give more with -c, or shorten them (--prompt-tokens, -n)",
                needed_tokens=needed,
                context_tokens=context_tokens,
            )

    def _measure(self, planned: Planner, plan: Plan, shards: list[Path]) -> tuple[list[Measurement], str, MemoryBox]:
        prompt = arbitrary_tokens(self._task.prompt_tokens, planned.known.vocabulary)
        self._group = group = OwnMemoryGroup(plan.budget_bytes)
        backends, problem = [OURS, MMAP] if self._task.has_mmap else [OURS], ""
        measurements = []
        for number in range(self._task.rounds):
            for backend in list(backends):
                what = f"Round {number + 1} of {self._task.rounds}: {_NAMES[backend]}"
                drop_from_page_cache(shards)
                try:
                    measurements.append(self._run_child(backend, prompt, group, what, _expected_s(plan, self._task)))
                except _OutOfMemory:
                    problem = f"the kernel ended it for want of memory inside {format_size(plan.budget_bytes)}"
                    if backend == OURS:
                        raise BudgetError(
                            f"{self._path}: edge-run took more than its budget: {problem}; please report this, and "
                            "give more --memory until it is mended"
                        ) from None
                    backends.remove(MMAP)
        limit_bytes = 0 if group.reason else plan.budget_bytes
        return measurements, problem, MemoryBox(limit_bytes, group.reason, read_ahead_bytes(self._path))

    def _run_child(
        self, backend: str, prompt: list[int], group: OwnMemoryGroup, what: str, expected_s: float
    ) -> Measurement:
        folder = group.renew()
        request = {
            "path": os.fspath(self._path.absolute()),
            "config": _as_json(replace(self._config, backend=backend, check_file=False)),
            "prompt": prompt,
            "predict": self._task.predict_tokens,
            "group": os.fspath(folder or ""),
            "limit_bytes": group.limit_bytes if folder else 0,
        }
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(request).encode("utf-8", "surrogateescape"))
            stdin.seek(0)
            self._child = subprocess.Popen(
                [sys.executable, "-m", "edge_run.runtime.bench_child"],
                stdin=stdin, stdout=stdout, stderr=stderr,
                start_new_session=True,  # Ctrl-C ends it through us
            )  # fmt: skip
            try:
                code = self._wait(self._child, what, expected_s if backend == OURS else 0)
            except BaseException:
                self.close()
                raise
            kills = group.kills
            stdout.seek(0)
            stderr.seek(0)
            answer, _, text = stdout.read().decode("utf-8", "replace").partition("\n")
            words = stderr.read().decode("utf-8", "replace").split()
        self._child = None
        group.close()
        if code == 0 and answer == "ok":
            return parse_measurement(text)
        if code == 0 and answer == "error":
            kind, message = json.loads(text)
            raise getattr(errors, kind)(message)
        if kills:
            raise _OutOfMemory
        raise KernelError(
            f"{self._path}: the process that measured {_NAMES[backend]} ended with {code}: "
            f"{' '.join(words)[-LAST_WORDS:] or 'without a word'}",
            found=code,
        )

    def _wait(self, child: subprocess.Popen[bytes], what: str, expected_s: float) -> int:
        started = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - started
            about = f" of about {expected_s:.0f}" if expected_s >= 1 else ""
            self._on_step(f"{what}, {elapsed_s:.0f}{about} s (Ctrl-C stops)")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(TICK_S)


_NAMES = {OURS: "edge-run", MMAP: "llama.cpp's mmap"}


def arbitrary_tokens(count: int, vocabulary: int) -> list[int]:
    """Return `count` tokens from all over a vocabulary, always the same."""
    return [_STRIDE * (i + 1) % vocabulary for i in range(count)]


def drop_from_page_cache(paths: Iterable[Path]) -> None:
    """Let the next reading of the files come from storage, as far as no other process has them mapped."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system that cannot
                os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_ahead_bytes(path: Path, root: Path = Path("/")) -> int:
    """Return how much the kernel reads ahead of a page fault in the file at `path`, 0 where it does not say."""
    device = path.stat().st_dev
    place = root / f"sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
    try:
        return int(place.read_text()) * KIB
    except (OSError, ValueError):
        return 0


def parse_measurement(text: str) -> Measurement:
    """Return what a child wrote."""
    found = json.loads(text)
    found["numerics"] = Numerics(**found["numerics"])
    found["token_ids"] = tuple(found["token_ids"])
    return Measurement(**found)


def _expected_s(plan: Plan, task: Task) -> float:
    forecast = plan.forecast
    if forecast is None or not forecast.decode_tokens_per_s:
        return 0.0
    decode_s = (task.predict_tokens - 1) / forecast.decode_tokens_per_s
    return forecast.load_s + forecast.first_token_s + decode_s


def _as_json(config: ModelConfig) -> dict[str, object]:
    """Return the fields of `config` for a child; without a cache folder, the default is named."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    found["cache_folder"] = os.fspath(config.cache_folder or Path.home() / ".cache" / "edge-run")
    return found
