"""How much of the work at hand is done, and how long the rest will take: predicted at first, corrected on the way.

The work is a sequence of steps (reading the model, then passes), each with its expected duration: in seconds where the
device was measured, else relative to the other steps. The more is done, the more the observed pace counts, and the less
the expected one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from edge_run.base.protocols import Clock
from edge_run.runtime.llama.context_shape import ContextShape

if TYPE_CHECKING:  # these take long to load, and the inspector of files does without
    from edge_run.base.results import Plan, Progress

MOST_PACES = 256


class ExpectedTimes(Protocol):
    """The expected durations of a forecast, for a device that was measured."""

    @property
    def reading_s(self) -> float:
        """The seconds of reading a model that stays in memory."""
        ...

    def pass_s(self, tokens: int, position: int, n_outputs: int, is_first: bool) -> float:
        """Return the seconds of one pass of `tokens` tokens from `position` on."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the work.

    stage: what is done.
    tokens: the tokens that are done when the step is.
    units: its duration, in seconds or relative to the other steps.
    """

    stage: str
    tokens: int
    units: float

    @property
    def is_token(self) -> bool:
        """Whether the step is a pass of one token, in a model that was read before."""
        return self.stage == "prompt" and self.tokens == 1


def pass_steps(
    plan: Plan, times: ExpectedTimes | None, n_tokens: int, position: int, shape: ContextShape, is_unread: bool
) -> list[Step]:
    """Return the steps of a batch of `n_tokens` tokens from `position` on; in seconds where `times` are known.

    is_unread: whether the model has not been read yet. A model that stays in memory is read before the first pass, a
        streamed one in the first pass.
    """
    steps, is_streamed = [], plan.mode == "streamed"
    if is_unread and not is_streamed:
        steps.append(Step("reading", 0, times.reading_s if times else float(plan.model_bytes)))
    for start in range(0, n_tokens, shape.micro_batch_tokens):
        tokens, is_first = min(shape.micro_batch_tokens, n_tokens - start), is_unread and is_streamed and start == 0
        if times:
            units = times.pass_s(tokens, position + start, int(start + tokens == n_tokens), is_first)
        else:
            units = float(plan.model_bytes if is_first or not is_streamed else plan.streamed_bytes_per_pass)
        steps.append(Step("reading" if is_first else "prompt", tokens, max(units, 1e-9)))
    return steps


class Timeline:
    """The steps of the work at hand. One thread works; any thread may ask for a snapshot.

    paces: the durations of the latest passes of one token, over the expected ones in seconds.
    """

    def __init__(self, share_of_step: Callable[[], float] = lambda: 0.0, clock: Clock = time.monotonic) -> None:
        """Begin without work. share_of_step: returns the share of the present step that is done, 0 to 1."""
        self._share_of_step, self._clock = share_of_step, clock
        self._lock = threading.Lock()
        self._steps: Sequence[Step] = ()
        self._position = 0  # up to which tokens are done
        self._on_step: Callable[[int], object] | None = None
        self._is_timed = False
        self._n_done = 0
        self._started_s = 0.0
        self._told_share = 0.0  # which never falls, whatever moment between two passes is seen
        self.paces: deque[float] = deque(maxlen=MOST_PACES)

    @contextmanager
    def telling(self, on_step: Callable[[int], object]) -> Iterator[None]:
        """Have `on_step` told, in this block, up to which position tokens are done: at first, and after each step."""
        self._on_step = on_step
        try:
            yield
        finally:
            self._on_step = None

    def begin(self, steps: Sequence[Step], is_timed: bool = False, position: int = 0) -> None:
        """Start on `steps`. is_timed: whether their units are seconds. position: of the first token."""
        with self._lock:
            self._steps, self._is_timed, self._n_done, self._started_s = tuple(steps), is_timed, 0, self._clock()
            self._told_share, self._position = 0.0, position
        self._tell()

    def advance(self) -> None:
        """Note that the present step is done."""
        with self._lock:
            if self._is_timed and len(self._steps) == 1 and self._steps[0].is_token:
                self.paces.append((self._clock() - self._started_s) / self._steps[0].units)
            if self._n_done < len(self._steps):
                self._position += self._steps[self._n_done].tokens
            self._n_done += 1
        self._tell()

    def end(self) -> None:
        """Note that the work is over."""
        with self._lock:
            self._steps = ()

    def _tell(self) -> None:
        """Without the lock, in the thread that works: who is told may wait for one that asks for a snapshot."""
        if self._on_step is not None:
            self._on_step(self._position)

    def snapshot(self) -> Progress | None:
        """Return how far the work is, None when there is none."""
        with self._lock:
            steps, is_timed, n_done = self._steps, self._is_timed, self._n_done
            elapsed_s = self._clock() - self._started_s
        if n_done >= len(steps):
            return None
        share = min(1.0, max(0.0, self._share_of_step()))
        whole = sum(step.units for step in steps)
        share = (sum(step.units for step in steps[:n_done]) + share * steps[n_done].units) / whole
        with self._lock:
            if steps is self._steps:
                self._told_share = share = max(share, self._told_share)
        from edge_run.base.results import Progress

        done = share * whole
        return Progress(
            stage=steps[n_done].stage,
            done_tokens=sum(step.tokens for step in steps[:n_done]),
            all_tokens=sum(step.tokens for step in steps),
            share=share,
            elapsed_s=elapsed_s,
            remaining_s=_remaining_s(done, whole, elapsed_s, is_timed),
        )


def _remaining_s(done: float, whole: float, elapsed_s: float, is_timed: bool) -> float | None:
    """Return the seconds that are left: by the expected pace at first, by the observed pace in the end."""
    if not is_timed and not done:
        return None
    seen = elapsed_s / done if done else 1.0
    trust = done / whole if is_timed else 1.0
    return max(0.0, (whole - done) * (trust * seen + (1 - trust)))
