"""What `edge-run bench` reports: a prediction, what was measured, and llama.cpp's mmap beside it; a server's load."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from edge_run.base.results import ExpertUse, Numerics, Plan

OURS, MMAP = "edge-run", "llama.cpp"
BACKEND_NAMES = {OURS: "edge-run", MMAP: "llama.cpp's mmap"}
COMPARED = (
    "load_s",
    "first_token_s",
    "start_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "bytes_per_token",
    "peak_bytes",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cold run in a process of its own.

    backend: `edge-run`, or `llama.cpp` with its mmap. mode: as in Plan. load_s: to open the model; first_token_s: from
    then to the first token; start_s: both. decode_tokens_per_s: of the tokens after the first. bytes_per_token: read
    from storage for each of those; bytes_read: in the whole run; None where it cannot be told. peak_bytes: resident at
    most. limit_bytes: of the memory group that it ran in, 0 for none; a group is not charged for libraries that other
    processes have loaded, so that peak_bytes may be more.
    """

    backend: str
    mode: str
    load_s: float
    first_token_s: float
    start_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_per_token: float | None
    bytes_read: int | None
    peak_bytes: int
    swapped_bytes: int
    limit_bytes: int
    token_ids: tuple[int, ...]
    numerics: Numerics
    experts: ExpertUse | None = None


@dataclass(frozen=True, slots=True)
class RunSpread:
    """A figure over all rounds of a benchmark.

    median: the median.
    least: the smallest value.
    most: the largest value.
    """

    median: float
    least: float
    most: float

    @property
    def half_range(self) -> float:
        """Half of what lies between the least and the most, as a share of the median."""
        return (self.most - self.least) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, by its name in Measurement. None: not predicted, not measured, or nothing to divide by.

    deviation: how far the prediction is above the measurement, as a share of that. ratio: edge-run over mmap.
    """

    name: str
    predicted: float | None
    measured: RunSpread | None
    mmap: RunSpread | None
    deviation: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class MemoryBox:
    """The memory group that runs were measured in. limit_bytes: 0 for none, and why there is none.

    read_ahead_bytes: what the kernel reads ahead of a page fault on the model's disk, 0 where it does not say: mmap's
    speed hangs on it.
    """

    limit_bytes: int
    reason: str
    read_ahead_bytes: int


@dataclass(frozen=True, slots=True)
class Bench:
    """A prediction and what came of it.

    started_at: ISO 8601, UTC. plan: made before anything was measured, with its forecast; profiled_at: when the oldest
    figure that it is made of was measured; profile_problem: what is wrong with those, empty for nothing. measurements:
    in the order in which they ran. has_same_tokens: whether all gave the same tokens; None where nothing was compared.
    mmap_problem: why mmap could not be measured to the end, empty where it was.
    """

    model: str
    started_at: str
    cpu: str
    cores: int
    library: str
    numerics: Numerics
    prompt_tokens: int
    predict_tokens: int
    rounds: int
    plan: Plan
    profiled_at: str
    profile_problem: str
    box: MemoryBox
    measurements: tuple[Measurement, ...]
    comparisons: tuple[Comparison, ...]
    has_same_tokens: bool | None
    mmap_problem: str

    def comparison(self, name: str) -> Comparison:
        """Return the comparison of this name."""
        return next(comparison for comparison in self.comparisons if comparison.name == name)


def predictions(plan: Plan) -> dict[str, float]:
    """Return what `plan` says of the figures in COMPARED."""
    found: dict[str, float] = {
        "bytes_per_token": plan.forecast.read_bytes_per_token if plan.forecast else plan.streamed_bytes_per_pass,
        "peak_bytes": sum(item.size_bytes for item in plan.items),
    }
    if (forecast := plan.forecast) is not None:
        found |= {
            "load_s": forecast.load_s,
            "first_token_s": forecast.first_token_s,
            "start_s": forecast.load_s + forecast.first_token_s,
            "prefill_tokens_per_s": forecast.prefill_tokens_per_s,
            "decode_tokens_per_s": forecast.decode_tokens_per_s,
        }
    return found


def compare(plan: Plan, measurements: Iterable[Measurement]) -> tuple[Comparison, ...]:
    """Return each figure as predicted by `plan`, as measured, and as mmap has it."""
    measurements, predicted = tuple(measurements), predictions(plan)
    return tuple(
        _comparison(name, predicted.get(name), _spread(measurements, OURS, name), _spread(measurements, MMAP, name))
        for name in COMPARED
    )


def same_tokens(measurements: Iterable[Measurement]) -> bool | None:
    """Return whether all of `measurements` gave the same tokens under one numerics key.

    None for fewer than two, and where only some ran with repacked weights, or as llama.cpp's own loader repacks,
    each kind of run with tokens of its own.
    """
    outcomes: dict[tuple[str, bool], list[object]] = {}
    for measurement in measurements:
        numerics = measurement.numerics
        kind = numerics.repacked, numerics.use_extra_bufts
        outcomes.setdefault(kind, []).append((measurement.token_ids, numerics))
    if any(len(set(found)) > 1 for found in outcomes.values()):
        return False
    return True if len(outcomes) == 1 and sum(map(len, outcomes.values())) > 1 else None


def _comparison(name: str, predicted: float | None, measured: RunSpread | None, mmap: RunSpread | None) -> Comparison:
    deviation = ratio = None
    if predicted is not None and measured is not None and measured.median:
        deviation = predicted / measured.median - 1
    if measured is not None and mmap is not None and mmap.median:
        ratio = measured.median / mmap.median
    return Comparison(name, predicted, measured, mmap, deviation, ratio)


def _spread(measurements: Iterable[Measurement], backend: str, name: str) -> RunSpread | None:
    values = [getattr(measurement, name) for measurement in measurements if measurement.backend == backend]
    known = [float(value) for value in values if value is not None]
    return RunSpread(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class LoadSpread:
    """Times, in seconds: so many percent of all were at most so long."""

    median: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How a server answered a load.

    server: its address. model: what was asked for; empty: whatever it has. clients: that asked at a time.
    seconds: how long. answers: that were finished. errors: requests that were refused or broke off.
    messages: the most frequent ones of these. prompt_tokens: of finished answers. tokens: that came, also of answers
    that the end cut off. first_token_s: from the request to the first piece of text. between_tokens_s: from a piece
    to the next. answer_s: whole answers.
    """

    server: str
    model: str
    clients: int
    seconds: float
    answers: int
    errors: int
    messages: tuple[str, ...]
    prompt_tokens: int
    tokens: int
    tokens_per_s: float
    first_token_s: LoadSpread | None
    between_tokens_s: LoadSpread | None
    answer_s: LoadSpread | None
