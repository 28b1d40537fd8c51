"""Tunables, which are set by measuring: the present setting is compared with one other setting at a time.

A window is a few tokens under one setting. Windows of the two settings alternate in the order ABBA, so that a drift
cancels out. The first token of a window is not counted, as the other setting still affects it. A setting is replaced
only by one that was faster with the stated confidence. One that is clearly no faster is given up sooner than one is
taken, as every second token of a comparison is under it; and where a step further is slower, steps beyond it are not
tried before the next round. Pure: seconds in, settings out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_run.base.results import TuningDecision

WINDOW_TOKENS = 4  # that count, of each setting in turn
LEAST_PAIRS = 6
LEAST_PAIRS_TO_END = 2  # of a setting that does not gain by all that is within the deviations
MOST_PAIRS = 24
CONFIDENCE = 0.95
# Deviations of the mean. The difference is looked at after every pair, which makes chance findings likelier: with 2.7,
# settings that are alike in truth are told apart in about 5 % of the comparisons (simulated).
DEVIATIONS = 2.7
HOPE = 0.6  # of these deviations, within which a gain must lie for a comparison to go on
LEAST_GAIN = 0.01
OUTLIER = 3.0
FIRST_REST_TOKENS = 256  # between one round of comparisons and the next; doubles
LAST_REST_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Tunable:
    """Something that can be set.

    name: its name.
    settings: its possible settings, each of which goes a step further than the one before.
    first: the one to begin with; the first of them by default.
    """

    name: str
    settings: Sequence[str]
    first: str = ""

    def beyond(self, setting: str, further: str) -> Sequence[str]:
        """Return the settings that go further than `further`, where that goes further than `setting`."""
        place = self.settings.index(further)
        return self.settings[place + 1 :] if self.settings.index(setting) < place else ()


class Controller:
    """Compares settings, one tunable after the other. Not thread-safe.

    chosen: the setting of each tunable outside comparisons.
    """

    def __init__(self, tunables: Sequence[Tunable]) -> None:
        self._tunables = {tunable.name: tunable for tunable in tunables}
        self.chosen = {tunable.name: tunable.first or tunable.settings[0] for tunable in tunables}
        self._candidates = [(tunable.name, setting) for tunable in tunables for setting in tunable.settings]
        self._untried: list[tuple[str, str]] = []
        self._rest, self._next_rest = 0, FIRST_REST_TOKENS
        self._decisions: dict[tuple[str, str], TuningDecision] = {}
        self._trial: _Trial | None = None
        self._begin_round()

    @property
    def settings(self) -> Mapping[str, str]:
        """The setting of each tunable for the next token."""
        if self._trial is None or not self._trial.is_challenger:
            return self.chosen
        return {**self.chosen, self._trial.tunable: self._trial.setting}

    @property
    def decisions(self) -> tuple[TuningDecision, ...]:
        """The latest decided comparison of each setting."""
        return tuple(self._decisions.values())

    def note(self, seconds: float, need: float) -> None:
        """Count a token that took `seconds` under `settings`, and go on to the next one.

        need: how much had to be read for the token, under any setting, in any unit.
        """
        if self._trial is None:
            self._rest -= 1
            if self._rest <= 0:
                self._begin_round()
            return
        self._trial.note(seconds, need)
        if (is_better := self._trial.verdict) is not None:
            self._conclude(self._trial, is_better)

    def interrupt(self) -> None:
        """Begin the window anew, because something else came between two tokens."""
        if self._trial is not None:
            self._trial.interrupt()

    def _begin_round(self) -> None:
        self._untried = list(self._candidates)
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._trial = None
        while self._untried and self._trial is None:
            tunable, setting = self._untried.pop(0)
            if setting != self.chosen[tunable]:
                self._trial = _Trial(tunable, setting)
        if self._trial is None:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LAST_REST_TOKENS)

    def _conclude(self, trial: _Trial, is_better: bool) -> None:
        before = self.chosen[trial.tunable]
        self._decisions[trial.tunable, trial.setting] = trial.decision(before, is_better)
        if is_better:
            self.chosen[trial.tunable] = trial.setting
        elif trial.is_slower:
            beyond = self._tunables[trial.tunable].beyond(before, trial.setting)
            self._untried = [one for one in self._untried if one[0] != trial.tunable or one[1] not in beyond]
        self._begin_trial()


class _Trial:
    """A comparison of a setting with the present one, by analysis of covariance.

    Tokens differ in how much must be read for them, whatever the setting. The part of their times that depends on that
    is removed by a slope that both settings share (Cochran, 1957, section 2).
    """

    def __init__(self, tunable: str, setting: str) -> None:
        self.tunable, self.setting = tunable, setting
        self._n_windows = self._in_window = 0
        self._tokens: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])  # (need, seconds) of each

    @property
    def is_challenger(self) -> bool:
        """Whether the next token is under `setting`, in the order ABBA."""
        return self._n_windows % 4 in (1, 2)

    def note(self, seconds: float, need: float) -> None:
        if self._in_window:
            self._tokens[self.is_challenger].append((need, seconds))
        self._in_window += 1
        if self._in_window > WINDOW_TOKENS:
            self._n_windows += 1
            self._in_window = 0

    def interrupt(self) -> None:
        self._in_window = 0

    @property
    def verdict(self) -> bool | None:
        """Whether `setting` is better; None while this is undecided."""
        n_pairs, is_between = divmod(self._n_windows, 2)
        if self._in_window or is_between or n_pairs < LEAST_PAIRS_TO_END:
            return None
        before, difference, error = self._difference()
        if n_pairs < LEAST_PAIRS:
            return False if difference - DEVIATIONS * error > -LEAST_GAIN * before else None
        if difference + DEVIATIONS * error < 0:
            return True
        is_hopeless = difference - HOPE * DEVIATIONS * error > -LEAST_GAIN * before
        return False if is_hopeless or self._n_windows >= 2 * MOST_PAIRS else None

    @property
    def is_slower(self) -> bool:
        """Whether `setting` is slower, by more than the deviations."""
        _, difference, error = self._difference()
        return difference > DEVIATIONS * error

    def decision(self, before: str, is_better: bool) -> TuningDecision:
        seconds, difference, error = self._difference()
        gain, low, high = (
            seconds / max(seconds + difference + deviations * error, 1e-9) - 1
            for deviations in (0, DEVIATIONS, -DEVIATIONS)
        )
        return TuningDecision(
            tunable=self.tunable,
            setting=self.setting if is_better else before,
            other=before if is_better else self.setting,
            tried=self.setting,
            gain=gain,
            gain_low=low,
            gain_high=high,
            confidence=CONFIDENCE,
            tokens=self._n_windows * (WINDOW_TOKENS + 1),
        )

    def _difference(self) -> tuple[float, float, float]:
        """Return a token's mean seconds under the present setting, their change under `setting`, and its error."""
        groups = [_within_reason(group) for group in self._tokens]
        means = [tuple(map(statistics.fmean, zip(*group, strict=True))) for group in groups]
        apart = [(x - mx, y - my) for group, (mx, my) in zip(groups, means, strict=True) for x, y in group]
        xx = sum(x * x for x, _ in apart)
        xy = sum(x * y for x, y in apart)
        yy = sum(y * y for _, y in apart)
        slope = xy / xx if xx else 0.0
        need_apart = means[1][0] - means[0][0]
        variance = max(yy - slope * xy, 0.0) / (len(apart) - 3)
        spread = sum(1 / len(group) for group in groups) + (need_apart**2 / xx if xx else 0.0)
        return means[0][1], means[1][1] - means[0][1] - slope * need_apart, math.sqrt(variance * spread)


def _within_reason(tokens: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return `tokens` without those that took far longer than others, because something else held them up."""
    most = OUTLIER * statistics.median(seconds for _, seconds in tokens)
    return [token for token in tokens if token[1] <= most]
