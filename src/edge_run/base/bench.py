"""What `edge-run bench` reports: a prediction, what was measured, and llama.cpp's mmap beside it; a server's load."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.config import Backend
from edge_run.base.results import ExpertUse, Numerics, Plan

OURS: Backend = "edge-run"
MMAP: Backend = "llama.cpp"
BACKEND_NAMES: dict[str, str] = {OURS: "edge-run", MMAP: "llama.cpp's mmap"}


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
    figure that it is made of was measured, empty without a forecast; profile_problem: what is wrong with those, or why
    there are none, empty for nothing. measurements: in the order in which they ran. has_same_tokens: whether all gave
    the same tokens; None where nothing was compared. mmap_problem: why mmap could not be measured to the end, empty
    where it was.
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
