"""How wide the next pass is, and whether guessing is worth its time: the width with the most expected tokens a second.

A state machine without I/O: what was measured goes in, a width comes out. A pass without guesses, which is plain
decoding, is always a candidate: it has the one token of each text that is certain. Some places of a text are easy to
guess and some are not, so whether to guess at all hangs on what the latest passes with guesses gained together, never
on a single one. While plain decoding is better, guesses are still made now and then, at a hundredth of the time, and
held against what comes: so speculation begins again when it would pay. Each new text is guessed at. Of several that
share passes a draft model would have to read each one first, so it rests until it is known what plain passes take; they
are guessed at where wider passes are expected to take little longer, and are only tried otherwise, a few of them: at
once where trying costs nothing, after a while where it takes a draft model. Plain passes are made now and then while
guessing pays, at first more often: they say what it gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.speculation.drafting import Pace

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # few, since each has a graph of its own
LEAST_GAIN = 1.03
# Where passes stream by expert, a verification batch also takes from the cache what the next ones would have found:
# that is in no estimate, and was 5 to 8 % where such batches were expected to be worth a little.
LEAST_GAIN_BY_EXPERT = 1.15
LEAST_GAIN_OF_SEVERAL = 1.15  # of texts in shared passes: they end the less together, and the last ones are slow
TRIAL_SHARE = 0.01  # of the time, for guesses that are only held against what comes
PLAIN_FIRST, PLAIN_EVERY, PLAIN_EVERY_IF_CLOSE, CLOSE_GAIN = 8, 96, 24, 1.3
PLAIN_GROWTH = 4  # of the passes to the next plain one
SURE_GAIN = 2.5  # of one text: pays whatever the first plain pass took, which is the slowest
REST_AFTER = 4  # passes in which plain decoding was better
HOPE = 1.2  # of a text that begins: so much more than the least gain
LATEST = 0.25  # the share of the latest pass in what is usual

Offer = tuple[int, float]
"""What a pass may be: its tokens, padding included, and how many tokens of texts are expected of it."""

ONE_TEXT: Sequence[Offer] = ((1, 1.0),)


@dataclass(slots=True)
class _Usual:
    """What is usual of passes with guesses: tokens and seconds, in those of plain passes.

    tokens is 0 before there were any; seconds is 0, too, after a plain pass was made to be held against those to come.
    """

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        self.tokens += LATEST * (tokens - self.tokens)
        self.seconds += LATEST * (seconds - self.seconds)

    @property
    def gain(self) -> float:
        """The tokens a second over those of plain passes."""
        return self.tokens / self.seconds if self.seconds else 0.0


class WidthControl:
    """Decides for one conversation after the other, or for several that share passes. Not thread-safe.

    most_tokens: in a pass, the certain ones included. least_gain: expected of a wider pass, over plain decoding.
    is_on: whether the pass decided last had guesses, or may have had.
    rest: is called, between passes, when guesses have not been worth their time for a while: drafters may give back
        memory until they are asked again. rested_share: what plain passes read less then, of all that they read.
    first_trial_passes: plain passes that take as long as a first trial; 0: new texts are tried at once.
    """

    def __init__(self, costs: WidthCosts, most_tokens: int, least_gain: float = LEAST_GAIN) -> None:
        self._costs, self.most_tokens, self._least_gain = costs, most_tokens, least_gain
        self._draft_s = self._once_s = 0.0
        self._usual, self._of_texts = _Usual(), dict[int, _Usual]()  # now; by how many texts there are, roughly
        self.is_on = self._is_new = True
        self._plain: Offer = ONE_TEXT[0]
        self._least = least_gain  # of the texts that there are
        self.rest: Callable[[], None] = lambda: None
        self.rested_share, self.first_trial_passes, self._is_resting = 0.0, 0.0, False
        self._was_rested = False  # while the latest plain passes were made
        self._since_draft, self._since_plain, self._n_off = 0.0, 0, 0
        self._plain_after = PLAIN_FIRST

    def begin(self) -> None:
        """A text begins: it may be easier to guess than the one before."""
        self.is_on = self._is_new = True

    def begin_beside(self) -> None:
        """A text begins that shares passes with others: drafters rest until it is known what such passes take."""
        if not self._costs.is_known:
            self._rest()

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        """Return whether to make guesses for the next pass; while plain decoding is better, only now and then.

        hoped: what passes may be if guesses come true as often as may be hoped for; the first is plain, and has a token
            of each text.
        """
        self._plain = hoped[0]
        width, n_texts = self._plain
        self._least = self._least_gain if n_texts <= 1 else max(self._least_gain, LEAST_GAIN_OF_SEVERAL)
        self._since_draft += 1
        self._n_off = 0 if self.is_on else self._n_off + 1
        if not self._costs.is_known_near(width):
            return self._not_yet(n_texts)
        usual = self._of_texts.setdefault((round(n_texts) - 1).bit_length(), _Usual())  # 1, 2, 3 to 4, 5 to 8, ...
        if self._is_new or usual is not self._usual:
            if n_texts > 1 and not self._costs.is_known_near(width, is_settled=True):
                return self._not_yet(n_texts)
            self._turn_to(usual, hoped)
        if not self.is_on:
            pass_s = max(1e-9, self._costs.pass_s(width))
            # Who has rested reads what it needs, which `once_s` has; what it lent to the model is read twice beside
            # that: it streams in the trial's pass, and is read into memory of its own in the one after it.
            trial_s = self._draft_s + self._once_s or self.first_trial_passes * pass_s
            trial_s += 2 * self.rested_share * pass_s * self._is_resting
            if self._since_draft < trial_s / (TRIAL_SHARE * pass_s):
                if self._n_off > REST_AFTER:
                    self._rest()
                return False
        self._since_draft, self._is_resting = 0, False
        return True

    def _not_yet(self, n_texts: float) -> bool:
        """Want no guesses before plain passes have told what they take; those of several texts tell it rested."""
        if n_texts > 1:
            self._rest()
        return False

    def _rest(self) -> None:
        self.rest()
        self._is_resting = self._was_rested = True

    def _turn_to(self, usual: _Usual, hoped: Sequence[Offer]) -> None:
        """Go on with other texts, or as many as `usual` is of.

        Of a text that is alone guesses are hoped to pay: for a trial a draft model reads all of it as well.
        """
        was_worth_it = usual.tokens > 0 and (not usual.seconds or usual.gain >= self._least)
        if self._is_new or not usual.tokens:
            hope = HOPE * self._least
            if hoped[0][1] > 1 and max(tokens / seconds for tokens, seconds in self._over_plain(hoped).values()) < hope:
                hope, self._n_off = 0.0, REST_AFTER  # they are only tried
            usual.tokens = max(usual.tokens, hope * usual.seconds)
            self.is_on = was_worth_it or hope > 0
            if self._is_new and not self.is_on and not self.first_trial_passes:
                self._since_draft = math.inf
        else:
            self.is_on = was_worth_it
        self._usual, self._is_new = usual, False

    def observe_drafting(self, seconds: float, *, once_s: float = 0.0) -> None:
        """Note what making guesses took. once_s: of that, what the next ones will not take, as to read a text."""
        self._once_s = once_s * (not self.is_on)  # the next trial may read others
        if seconds > once_s:
            self._draft_s += (seconds - once_s - self._draft_s) * (0.25 if self._draft_s else 1.0)

    @property
    def pace(self) -> Pace:
        """As fast as the texts come that guesses are wanted of."""
        width, n_texts = self._plain
        if not self._costs.is_known:
            return Pace()
        wide = min(self._costs.widest, self.most_tokens)
        longer_s = max(0.0, self._costs.pass_s(wide) - self._costs.pass_s(width)) if wide > width else 0.0
        tokens_per_s = max(1.0, self._usual.gain) * n_texts / self._rested_s(width)
        return Pace(tokens_per_s, longer_s / max(1, wide - width))

    def observe_pass(self, width: int, wall_s: float, wait_s: float, read_s: float, read_bytes: int) -> None:
        """Note a pass; see `WidthCosts.observe`."""
        self._costs.observe(width, wall_s, wait_s, read_s, read_bytes)

    def best(self, offers: Sequence[Offer]) -> int:
        """Return which of `offers` the next pass takes up.

        The first is a pass without guesses. The guesses are made, so that all take the time of making them.
        """
        self._since_plain += 1
        over_plain = self._over_plain(offers)
        gains = {n: tokens / seconds for n, (tokens, seconds) in over_plain.items()}
        gains[0] *= self._least
        chosen, usual, is_trial = max(gains, key=gains.__getitem__), self._usual, not self.is_on
        if not usual.seconds:
            usual.tokens = max(gains[chosen], HOPE * self._least) if self.is_on else 1.0
            usual.seconds = 1.0
        usual.note(*over_plain[chosen])
        self.is_on = usual.gain >= self._least
        if is_trial or not self.is_on:
            return 0
        is_due = self._since_plain >= self._plain_due(round(offers[0][1]))
        if is_due:
            self._plain_after *= PLAIN_GROWTH
            usual.seconds, self._was_rested = 0.0, False  # what guesses gain is held against that pass from now on
        if is_due or chosen == 0:
            self._since_plain = 0
            return 0
        return chosen

    def _over_plain(self, offers: Sequence[Offer]) -> dict[int, tuple[float, float]]:
        """Return the tokens and seconds of those of `offers` that may be tried, in those of the plain one."""
        plain, n_plain = offers[0]
        plain_s = self._rested_s(plain)
        return {
            n: (n_tokens / n_plain, (self._unrested_s(width) + self._draft_s) / plain_s)
            for n, (width, n_tokens) in enumerate(offers)
            if n == 0 or self._costs.is_within_reach(width)
        }

    def _unrested_s(self, width: int) -> float:
        """Return what a pass would take once drafters that rest had their memory again."""
        share = self.rested_share if self._is_resting and self._costs.is_read_bound(width) else 0.0
        return self._costs.pass_s(width) * (1 + share)

    def _rested_s(self, plain: int) -> float:
        """Return what a plain pass takes while drafters rest, as the latest ones told, which they may not have done."""
        share = 0.0 if self._was_rested or not self._costs.is_read_bound(plain) else self.rested_share
        return max(1e-9, self._costs.pass_s(plain) * (1 - share))

    def _plain_due(self, n_texts: int) -> int:
        """Return after how many passes a plain one is made while guesses pay.

        It is sooner where several texts share passes: guesses gain less there, and a plain pass loses less.
        """
        if self._usual.gain >= SURE_GAIN and n_texts == 1:
            return PLAIN_EVERY
        every = PLAIN_EVERY_IF_CLOSE if self._usual.gain < CLOSE_GAIN else PLAIN_EVERY
        return min(every, max(2, self._plain_after // n_texts))

    def expected_s(self, width: int, *, is_guessed: bool) -> float:
        """Return the seconds that a pass is expected to take, with the guesses for it."""
        return self._costs.pass_s(width) + is_guessed * self._draft_s

    def plain_s(self, width: int = 1) -> float | None:
        """Return what a pass takes without guesses now, None before a pass was seen. width: its tokens then."""
        return self._costs.pass_s(width) if self._costs.is_known else None
