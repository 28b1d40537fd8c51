"""A speculating conversation over a cache of cells, as llama.cpp has one: what it returns hangs on the text alone."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells import CONTEXT, VOCABULARY, Cells, row_of
from edge_run.base.errors import KernelError, TierReadError
from edge_run.base.protocols import BatchToken, Logits
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.speculation.drafting import Guess, Guesses, Pace, WantedGuesses
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.shared_drafters import OpenText
from edge_run.runtime.speculation.verification import FORESEEN
from random_guesses import Always, AnyWidth, Guesser, guesses_of, speculating

TEXT = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=CONTEXT)


@given(TEXT, st.integers(1, 6), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_row_is_that_of_the_text_so_far(
    text: list[int], prompt: int, seed: int, can_branch: bool, is_exact: bool
) -> None:
    decoder = Cells(can_branch)
    session = speculating(decoder, text, seed, is_exact)
    start = min(prompt, len(text) - 1)
    logits, _ = session.feed(text[:start])
    assert np.array_equal(logits, row_of(text[:start]))
    for place in range(start, len(text)):
        row = session.step(text[place])
        assert np.array_equal(row, row_of(text[: place + 1]))
        assert session.history == text[: place + 1]
    figures = session.speculation()
    assert figures.passes + figures.accepted == len(text) - start
    assert sum(figures.widths.values()) == figures.passes
    assert figures.noise == 0 or not is_exact


@given(TEXT, TEXT, st.integers(0, 2**32), st.booleans())
def test_a_new_prompt_after_any_number_of_steps_finds_the_common_prefix(
    text: list[int], other: list[int], seed: int, is_exact: bool
) -> None:
    plain, guessing = Session(Cells(False)), speculating(Cells(True), text, seed, is_exact)
    for session in (plain, guessing):
        session.feed(text[:2][:1])
        for token in text[1:-1]:
            session.step(token)
    prompt = [*text[: len(text) // 2], *other][: CONTEXT - 1]
    (row, cached), (wanted, wanted_cached) = guessing.feed(prompt), plain.feed(prompt)
    assert cached == wanted_cached
    assert np.array_equal(row, wanted)


class Forgetful(Cells):
    """Cannot be cut, as a window or a state cannot: it is emptied instead."""

    def __init__(self) -> None:
        super().__init__(can_branch=False)
        self.decoded: list[list[int]] = []

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        self.decoded.append([token.token for token in batch])
        return super().decode(batch)

    def rewind(self, sequence: int, position: int) -> int:
        return super().rewind(sequence, position if position >= len(self.text(sequence)) else 0)


def test_nothing_of_a_conversation_that_is_over_is_computed_again() -> None:
    """It would take as long as reading it, and count as a part of the next prompt."""
    text, prompt, n_lost = [1, 2, 3, 4, 1, 2], [4, 3, 2, 1], 0
    for seed in range(60):
        decoder = Forgetful()
        session = speculating(decoder, [*text, 3, 4], seed, is_exact=False)
        session.feed(text[:2])
        for token in text[2:]:
            session.step(token)
        n_lost += len(decoder.text(0)) > len(session.history)
        decoder.decoded.clear()
        row, cached = session.feed(prompt)
        assert np.array_equal(row, row_of(prompt))
        assert (cached, decoder.decoded) == (0, [prompt])
    assert n_lost, "the decoder held guesses"


@given(TEXT, st.integers(0, 2**32), st.booleans())
def test_after_a_pass_that_failed_the_conversation_is_what_the_decoder_holds(
    text: list[int], seed: int, is_exact: bool
) -> None:
    decoder = Cells(True)
    session = speculating(decoder, text, seed, is_exact)
    session.feed(text[:1])
    decoder._failing = random.Random(seed)
    for _ in range(60):
        place = len(session.history)
        if place >= len(text):
            break
        try:
            if place == 0:
                session.feed(text[:1])
            else:
                row = session.step(text[place])
                assert np.array_equal(row, row_of(text[: place + 1]))
        except TierReadError:
            assert decoder.text(0) == session.history == text[: len(session.history)]
            assert all(members == {0} for _, _, members in decoder.cells), "a branch is left"


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_pass_that_fails_before_it_begins_leaves_no_branch(is_exact: bool) -> None:
    text = [random.Random(4).randrange(VOCABULARY) for _ in range(CONTEXT)]
    for seed in range(20):
        decoder = Cells(True)
        session = speculating(decoder, text, seed, is_exact)
        session.feed(text[:20])
        real = decoder.decode

        def fail(batch: Sequence[BatchToken]) -> Logits:
            raise TierReadError("the drive is gone")

        decoder.decode = fail  # type: ignore[method-assign]
        with contextlib.suppress(TierReadError):
            for token in text[20:]:
                session.step(token)
        decoder.decode = real  # type: ignore[method-assign]
        assert decoder.text(0) == session.history
        assert all(members == {0} for _, _, members in decoder.cells), "a branch is left"


@pytest.mark.parametrize("name", ["keep", "rewind", "passed", "observe_pass", "follows"])
@pytest.mark.parametrize("is_late", [False, True])
def test_ctrl_c_where_guesses_are_made_use_of_leaves_nothing_of_them(name: str, is_late: bool) -> None:
    """Whatever Python was about to do: the next prompt finds the conversation, or a beginning of it."""
    text = [random.Random(4).randrange(VOCABULARY) for _ in range(CONTEXT)]
    for seed, place in itertools.product(range(10), range(3, 9)):
        decoder = Cells(True)
        session = speculating(decoder, text, seed, is_exact=False)
        session.feed(text[:2])
        with contextlib.suppress(KeyboardInterrupt):
            for i in range(2, 2 + place):
                if i + 1 == 2 + place:
                    of: Any = decoder if name in ("keep", "rewind") else session._guesses
                    monkey = interrupting(of, name, is_late)
                session.step(text[i])
        monkey.undo()
        prompt = [*session.history[:-1], *text[:3]]
        assert np.array_equal(session.feed(prompt)[0], row_of(prompt))
        assert decoder.text(0) == prompt
        assert all(members == {0} for _, _, members in decoder.cells), "a branch is left"


def interrupting(of: Any, name: str, is_late: bool) -> pytest.MonkeyPatch:
    """Let a method raise KeyboardInterrupt, before or after what it does."""
    monkey, real = pytest.MonkeyPatch(), getattr(of, name)

    def interrupted(*given: Any, **named: Any) -> Any:
        if is_late:
            real(*given, **named)
        raise KeyboardInterrupt

    monkey.setattr(of, name, interrupted)
    return monkey


def test_an_answer_goes_on_where_guessing_fails() -> None:
    class Failing(Guesser):
        n_calls = 0

        def draft(self, *_: object) -> Guesses:
            self.n_calls += 1
            raise KernelError("llama.cpp failed")

    chance = random.Random(1)
    drafter = Failing(chance, [])
    session = SpeculativeSession(Cells(True), guesses_of(drafter, AnyWidth(chance)))
    for n_calls in (1, 2):
        session.feed([1, 2])
        for end in range(3, 20):
            assert np.array_equal(
                session.step(end % VOCABULARY), row_of([1, 2, *(i % VOCABULARY for i in range(3, end + 1))])
            )
        assert drafter.n_calls == n_calls, "once in an answer"
        assert session.speculation().reason == "guessing failed: llama.cpp failed"


def test_exact_speculation_returns_only_rows_of_cells_in_order() -> None:
    """What does not lie in the order of the text is computed again: cell by cell, the cache is the text."""
    text = [random.Random(3).randrange(VOCABULARY) for _ in range(CONTEXT)]
    for seed in range(40):
        decoder = Cells(True)
        session = speculating(decoder, text, seed, is_exact=True)
        session.feed(text[:2])
        for token in text[2:]:
            session.step(token)
            n = len(session.history)
            assert [cell[0] for cell in decoder.cells][:n] == list(range(n))
            assert [cell[1] for cell in decoder.cells][:n] == text[:n]


def test_that_a_drafter_reads_the_prompt_first_is_not_what_guessing_takes() -> None:
    """Otherwise a long prompt would switch speculation off for good."""
    now = 0.0

    class Slow(Guesser):
        n_calls = 0

        def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
            nonlocal now
            self.n_calls += 1
            self.once_s = 9.0 if self.n_calls == 1 else 0.0
            now += self.once_s + 0.01
            return super().draft(history, wanted)

    chance = random.Random(1)
    control = AnyWidth(chance)
    session = SpeculativeSession(Cells(False), guesses_of(Slow(chance, []), control, clock=lambda: now))
    session.feed([1])
    for token in (2, 3, 4, 1, 2, 3, 4):
        session.step(token)
    assert control.draft_s
    assert max(control.draft_s) < 0.02


def test_weights_that_come_back_are_not_what_guessing_takes() -> None:
    """A draft model rests while nothing is guessed: reading it anew is not what each guess would take."""
    now = 0.0

    class Rested(Guesser):
        n_calls = n_found = 0

        def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
            nonlocal now
            self.n_calls += 1
            self.once_s = 0.9 if self.n_calls % 3 == 0 else 0.0
            now += 0.01 + self.once_s
            found = super().draft(history, wanted)
            self.n_found += bool(found)
            return found

    chance = random.Random(1)
    control, drafter = AnyWidth(chance), Rested(chance, [])
    session = SpeculativeSession(Cells(False), guesses_of(drafter, control, clock=lambda: now))
    session.feed([1])
    for token in range(20):
        session.step(token % VOCABULARY)
    assert drafter.n_calls > drafter.n_found > 6
    assert len(control.draft_s) == drafter.n_found, "where there was nothing to guess, that says nothing of others"
    assert max(control.draft_s) < 0.02


def test_a_pass_that_tries_guesses_beside_it_says_nothing_of_those_to_come() -> None:
    """It may take twice as long as they will."""
    observed: list[int] = []

    class Noting(AnyWidth):
        def observe_pass(self, width: int, *took: float) -> None:
            observed.append(width)

    class Roomy(Guesser):
        def prepare(self, texts: Mapping[int, Sequence[int]], most_depth: int) -> bool:
            return True

    chance = random.Random(5)
    drafter = Roomy(chance, [])
    guesses = guesses_of(drafter, Noting(chance))
    guesses.drafters._overlap = Always(cast("Any", drafter))
    session = SpeculativeSession(Cells(False), guesses)
    session.feed([1])
    for token in range(20):
        session.step(token % VOCABULARY)
    widths = session.speculation().widths
    assert max(widths) > 1
    assert observed == [1] * widths[1]


def test_no_deeper_than_the_answer_may_go_on() -> None:
    asked: list[int] = []

    class Noting(Guesser):
        def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
            asked.append(wanted.most_depth)
            return super().draft(history, wanted)

    for seed in range(20):
        chance = random.Random(seed)
        guesses = guesses_of(Noting(chance, []), AnyWidth(chance), branches=range(1, 6))
        session = SpeculativeSession(Cells(True), guesses)
        session.feed([1])
        session.step(2, 0)
        assert asked == []
        session.step(3, 2)
        assert asked in ([], [2])  # at times nothing is wanted
        asked.clear()


def test_guesses_made_beside_a_pass_end_where_the_answer_does() -> None:
    """They were made when more of it was left."""

    class Right(Guesser):
        def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
            paths = [tuple(text[len(history) :][:depth]) for depth in range(1, wanted.most_depth + 1)]
            return {path: Guess(0.9 ** len(path), ("right", 0, 0), 0.9) for path in paths}

    text = [random.Random(6).randrange(VOCABULARY) for _ in range(CONTEXT)]
    for seed, end in itertools.product(range(10), (10, 20)):
        decoder, chance = Cells(False), random.Random(seed)
        drafter = Right(chance, text)
        guesses = guesses_of(drafter, AnyWidth(chance))
        guesses.drafters._overlap = Always(cast("Any", drafter))
        session = SpeculativeSession(decoder, guesses)
        session.feed(text[:1])
        for place in range(1, end):
            session.step(text[place], end - 1 - place)
            assert all(position < end for position, _, _ in decoder.cells)


@given(TEXT, st.integers(0, 2**32), st.booleans(), st.booleans())
def test_nothing_is_computed_beyond_the_end_of_an_answer(
    text: list[int], seed: int, can_branch: bool, is_exact: bool
) -> None:
    decoder = Cells(can_branch)
    session = speculating(decoder, text, seed, is_exact)
    session.feed(text[:1])
    for place in range(1, len(text)):
        row = session.step(text[place], len(text) - 1 - place)
        assert np.array_equal(row, row_of(text[: place + 1]))
        assert all(position < len(text) for position, _, _ in decoder.cells)


def test_the_likeliest_token_is_no_sure_one_where_others_are_drawn() -> None:
    text = [1, 2]
    while len(text) < CONTEXT:
        text.append(int(row_of(text).argmin()))
    session = speculating(Cells(True), text, 4, is_exact=True)
    drafters = session._guesses.drafters

    def guessed() -> Guesses:
        coming = OpenText([*session.history, 0], 0, 8, foreseen=(3, 4))
        return drafters.guess({0: coming}, 11, Pace(), is_trial=False)[0]

    session.feed(text[:2])
    before = guessed()
    assert before[3,].value > before[3, 4].value > 0.5
    for token in text[2:-8]:
        session.step(token)
    assert drafters.acceptance.chance(FORESEEN, 0.99) < 0.3
    after = guessed()
    assert after[3,].value < 0.3
    assert all(guess.value < 0.1 for path, guess in after.items() if path != (3,))
    session.feed([*text[:2], 0])
    assert drafters.acceptance.chance(FORESEEN, 0.99) > 0.7, "the next answer may be sampled otherwise"


@pytest.mark.parametrize("is_exact", [False, True])
def test_it_does_save_passes(is_exact: bool) -> None:
    text = [random.Random(5).randrange(VOCABULARY) for _ in range(CONTEXT)]
    passes = []
    for seed in range(20):
        session = speculating(Cells(True), text, seed, is_exact)
        session.feed(text[:2])
        for token in text[2:]:
            session.step(token)
        passes.append(session.speculation().passes)
    assert sum(passes) / len(passes) < 0.75 * (CONTEXT - 2)
