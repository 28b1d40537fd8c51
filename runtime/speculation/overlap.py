"""Guesses that are made while others are verified: the drafter goes on along the likeliest path, beside the pass.

When the pass confirms that path, the guesses for the next one are there already; otherwise they are dropped (PEARL, Liu
et al., 2025, its post-verify; here with trees, and only where it pays). A device has few cores, which the pass needs
when it does not wait for weights. So whether this is done is measured, by alternating, and not even tried where
guessing takes next to nothing, or where passes hardly wait: on two cores these took up to twice as long. It changes
nothing but the speed: what is verified is verified.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_run.base.errors import Cancelled, EdgeRunError
from edge_run.base.interrupt import Interrupt, JoinedThread, join_all
from edge_run.base.results import TuningDecision
from edge_run.partition.width_costs import LEAST_PASS_S
from edge_run.prefetch.controller import Controller, Tunable
from edge_run.runtime.speculation.drafting import Acceptance, Guess, Guesses, Pace, Path, WantedGuesses

if TYPE_CHECKING:
    from edge_run.runtime.speculation.draft_model import DraftModel

OFF, ON = "off", "on"
WORTH_SHARE = 0.02  # of a pass: what guessing must take at least
WAIT_SHARE = 0.5  # of a pass: how long it must wait for weights at least
SMOOTHING = 0.25

logger = logging.getLogger(__name__)


class Overlap:
    """A drafter of one text that goes on while its guesses are verified, if that pays. One thread at a time.

    once_s: as of its drafter; 0 for guesses that were made beside a pass.
    """

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter, self._number, self.once_s = drafter, 0, 0.0
        self._controller = Controller([Tunable("overlap", (OFF, ON))])
        self._asked = WantedGuesses(0, 0, Acceptance())
        self._ahead: tuple[list[int], Guesses] | None = None
        # Running means: of guesses made before passes, of passes, and of the share that those without guesses wait.
        self._guessing_s, self._pass_s, self._wait_share = 0.0, 0.0, 0.0
        self._was_ahead = self._was_beside = False

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """What was compared so far."""
        return self._controller.decisions

    @property
    def is_on(self) -> bool:
        """Whether the next pass is overlapped."""
        return self._is_worth_it and self._controller.settings["overlap"] == ON

    @property
    def was_trial(self) -> bool:
        """Whether the pass that is to be noted had guesses made beside it only to see whether that pays."""
        return self._was_beside and self._controller.chosen["overlap"] != ON

    @property
    def _is_worth_it(self) -> bool:
        return self._guessing_s > WORTH_SHARE * self._pass_s > 0 and self._wait_share > WAIT_SHARE

    def draft(self, history: Sequence[int], wanted: WantedGuesses, number: int = 0) -> Guesses:
        """Return guesses of what follows `history`, the drafter's text of that number."""
        self._asked, self._number, self.once_s, self._was_beside = wanted, number, 0.0, False
        ahead, self._ahead = self._ahead, None
        found = following(*ahead, history) if ahead else {}
        self._was_ahead = bool(found)
        if not found:
            found = self._drafter.draft_many({number: history}, wanted).get(number, {})
            self.once_s = self._drafter.once_s
        return found

    @contextmanager
    def going_on(self, text: Sequence[int]) -> Iterator[None]:
        """Guess what follows `text` while the block runs, if that pays; nothing is left running after it."""
        self._ahead, self._was_beside = None, False
        end = threading.Event()
        thread = JoinedThread(partial(self._go_on, list(text), end), "edge-run-overlap")
        if not self.is_on or not self._begins(thread, text, end):
            yield
            return
        self._was_beside = True
        try:
            yield
        finally:
            end.set()
            join_all([thread])

    def note(self, guessing_s: float, pass_s: float, wait_s: float, width: int) -> None:
        """Note what guesses for a pass and the pass took; wait_s: of that, waiting for weights; width: its tokens."""
        if not self._was_ahead:
            self._guessing_s += SMOOTHING * (guessing_s - self._guessing_s)
        if not self._was_beside:
            self._wait_share += SMOOTHING * (wait_s / max(pass_s, LEAST_PASS_S) - self._wait_share)
        self._pass_s += SMOOTHING * (pass_s - self._pass_s)
        if self._is_worth_it:
            self._controller.note(guessing_s + pass_s, width)
        else:
            self._controller.interrupt()
        self._was_beside = False

    def _begins(self, thread: JoinedThread, text: Sequence[int], end: threading.Event) -> bool:
        """Have `thread` guess what follows `text` until `end`; return whether it does: the pass can do without."""
        try:
            if not self._drafter.prepare({self._number: text}, self._asked.most_depth + 1):
                return False
            with Interrupt().hearing_signals():  # raised once it has an `ident`, or never began
                thread.start()
        except Cancelled:
            raise
        except KeyboardInterrupt:  # it may have begun: nobody else uses the draft model before it has ended
            end.set()
            if thread.ident is not None:
                join_all([thread])
            raise
        except (EdgeRunError, RuntimeError) as error:  # the latter where the system gives no more threads
            logger.info("no guesses beside a pass: %s", error)
            return False
        return True

    def _go_on(self, text: list[int], end: threading.Event) -> None:
        wanted = replace(self._asked, most_depth=self._asked.most_depth + 1, pace=Pace())
        try:
            self._ahead = text, self._drafter.draft_aside({self._number: text}, wanted, end).get(self._number, {})
        except Exception as error:  # the next guesses are made as ever, and raise it if it lasts
            logger.info("guesses beside a pass: %s", error)


def following(text: Sequence[int], guesses: Guesses, history: Sequence[int]) -> Guesses:
    """Return those of `guesses`, of what follows `text`, that follow `history`; none when those would be too few.

    `history` must be `text` and one token, whose paths reach as deep as any.
    """
    token = tuple(history[len(text) :])
    if len(token) != 1 or token not in guesses or list(history[: len(text)]) != list(text):
        return {}
    value = max(guesses[token].value, 1e-9)
    found: dict[Path, Guess] = {
        path[1:]: Guess(min(1.0, guess.value / value), guess.kind, guess.prior)
        for path, guess in guesses.items()
        if path[:1] == token and len(path) > 1
    }
    deepest = max(map(len, guesses))
    return found if found and max(map(len, found)) == deepest - 1 else {}
