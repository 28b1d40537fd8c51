"""What speculation did, counted for an answer, or for several."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from edge_run.base.errors import EdgeRunError
from edge_run.base.protocols import Logits
from edge_run.base.results import Speculation

logger = logging.getLogger(__name__)

LEAST_NOISE = 0.1  # as far as logits of the kit models differ between widths; a run sees too few to know for sure


class SpeculationTally:
    """Counts the figures of speculation, of one answer or of several; noise between widths outlives answers.

    mode: how tokens are guessed.
    reason: why speculation is off or limited.
    is_exact: whether logits do not depend on the width of a pass.
    """

    def __init__(self, mode: str, reason: str = "", *, is_exact: bool = False) -> None:
        self._mode, self._reason = mode, reason
        self._noise = 0.0 if is_exact else LEAST_NOISE
        self.begin()

    def begin(self) -> None:
        """Count from zero."""
        self._widths: Counter[int] = Counter()
        self._trials: Counter[int] = Counter()
        self._hits: Counter[int] = Counter()
        self._wall_s = self._draft_s = self._expected_s = self._expected_tokens = self._plain_s = 0.0
        self._n_off = self._n_accepted = self._n_planned = 0
        self._failure = ""
        self._gaps: list[float] = []
        self._n_near_ties = 0  # of tallies that were absorbed

    def of_another(self) -> SpeculationTally:
        """Return a tally of the same mode that has counted nothing, and knows how far logits differ."""
        other = SpeculationTally(self._mode, self._reason)
        other._noise = self._noise
        return other

    def absorb(self, other: SpeculationTally) -> None:
        """Count what `other` has counted as well."""
        for ours, theirs in ((self._widths, other._widths), (self._trials, other._trials), (self._hits, other._hits)):
            ours.update(dict(theirs))
        self._wall_s, self._draft_s = self._wall_s + other._wall_s, self._draft_s + other._draft_s
        self._expected_s += other._expected_s
        self._expected_tokens += other._expected_tokens
        self._plain_s += other._plain_s
        self._n_off, self._n_accepted = self._n_off + other._n_off, self._n_accepted + other._n_accepted
        self._failure = other._failure or self._failure
        self._noise = max(self._noise, other._noise)
        self._n_planned, self._n_near_ties = self._n_planned + other._n_planned, self._n_near_ties + other.n_near_ties

    def gave_up(self, error: EdgeRunError) -> None:
        """Note that nothing more is guessed, as that failed: what it was to speed up goes on without."""
        logger.warning("guessing failed, so nothing more is guessed in this answer: %s", error)
        self._failure = f"guessing failed: {error}"

    @property
    def has_given_up(self) -> bool:
        """Whether guessing failed."""
        return bool(self._failure)

    def planned(self, tokens: float, seconds: float) -> None:
        """Note what is expected of a pass: so many tokens, after so long."""
        self._expected_tokens += tokens
        self._expected_s += seconds
        self._n_planned += 1

    def decided(self, *, is_on: bool) -> None:
        """Note whether a pass might have had guesses."""
        self._n_off += not is_on

    def drafted(self, drafting_s: float) -> None:
        """Note what making guesses took."""
        self._draft_s += drafting_s

    def passed(self, width: int, wall_s: float, plain_s: float) -> None:
        """Note a pass; plain_s: what it would have taken without guesses."""
        self._widths[width] += 1
        self._wall_s += wall_s
        self._plain_s += plain_s

    def guessed(self, depth: int, is_hit: bool) -> None:
        """Note whether a guess came true, where what is before it did."""
        self._trials[depth] += 1
        self._hits[depth] += is_hit

    def accepted(self) -> None:
        """Note that a guess was used."""
        self._n_accepted += 1

    def looked_at(self, row: Logits) -> None:
        """Note logits that a token is chosen by, of a pass of several tokens."""
        at = int(row.argmax())  # to look for the second best on either side takes less than to sort by parts
        second = max(part.max(initial=-np.inf) for part in (row[:at], row[at + 1 :]))
        self._gaps.append(float(row[at] - second))

    def differed(self, difference: float) -> None:
        """Note how far the logits of a token differed between two widths."""
        self._noise = max(self._noise, difference)

    @property
    def n_near_ties(self) -> int:
        """How often the two best logits were closer than logits differ between widths."""
        return self._n_near_ties + sum(gap < self._noise for gap in self._gaps)

    def figures(self) -> Speculation:
        """Return the figures. Any thread may ask, while another one goes on."""
        widths, n_planned, expected_s = dict(self._widths), self._n_planned, self._expected_s
        passes = sum(widths.values())
        plain_s = self._plain_s / passes if passes else 0.0
        tokens, spent_s = passes + self._n_accepted, self._wall_s + self._draft_s
        depths = range(1, max(self._trials, default=0) + 1)
        return Speculation(
            mode=self._mode,
            reason=self._failure or self._reason,
            passes=passes,
            drafted=sum((width - 1) * count for width, count in widths.items()),
            accepted=self._n_accepted,
            tokens_per_pass=tokens / passes if passes else 0.0,
            expected_tokens_per_pass=self._expected_tokens / n_planned if n_planned else 0.0,
            acceptance_by_depth=tuple(self._hits[depth] / max(1, self._trials[depth]) for depth in depths),
            widths=dict(sorted(widths.items())),
            switched_off_share=self._n_off / passes if passes else 0.0,
            draft_s=self._draft_s,
            plain_token_s=plain_s,
            gain=tokens / spent_s * plain_s if spent_s else 1.0,
            expected_gain=self._expected_tokens / expected_s * plain_s if expected_s else 1.0,
            noise=self._noise,
            near_ties=self.n_near_ties,
        )
