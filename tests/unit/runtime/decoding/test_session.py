"""A conversation in a decoder: what is computed again, what is not, and what is left after an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import ContextFull, TierReadError
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.runtime.decoding.session import Session

CONTEXT = 16


class Decoder:
    """Keeps tokens instead of computing; its logits say which tokens it holds. Fails on token 99, half way through."""

    def __init__(self, can_rewind: bool = True) -> None:
        self.capabilities = Capabilities(CONTEXT, 4, 1, 100, can_rewind)
        self.kept: list[int] = []
        self.n_decoded = 0

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        assert [token.position for token in batch] == list(range(len(self.kept), len(self.kept) + len(batch)))
        assert [token.wants_logits for token in batch] == [False] * (len(batch) - 1) + [True]
        start = len(self.kept)
        for token in batch:
            if token.token == 99:
                self.rewind(0, start)
                raise TierReadError("the drive is gone")
            self.kept.append(token.token)
        self.n_decoded += len(batch)
        return self.row()

    def row(self) -> Logits:
        return np.array([[*self.kept, *[-1] * (100 - len(self.kept))]], np.float32)

    def rewind(self, sequence: int, position: int) -> int:
        if position < len(self.kept):
            del self.kept[position if self.capabilities.can_rewind else 0 :]
        return len(self.kept)


def tokens_of(logits: Logits) -> list[int]:
    return [int(value) for value in logits if value >= 0]


def test_a_prompt_that_goes_on_costs_only_what_is_new() -> None:
    decoder = Decoder()
    session = Session(decoder)
    session.feed([1, 2, 3])
    session.step(4)
    logits, n_cached = session.feed([1, 2, 3, 4, 5, 6])
    assert (n_cached, decoder.n_decoded) == (4, 6)
    assert tokens_of(logits) == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_while_the_context_is_shifted_leaves_nothing_of_it() -> None:
    decoder = Decoder()

    class Interrupted:
        def plan_shift(self, prompt_tokens: int, n_tokens: int) -> tuple[int, int]:
            return 1, 8

        def shift(self, position: int, n_tokens: int) -> None:
            del decoder.kept[position : position + n_tokens]
            raise KeyboardInterrupt

        def give_up(self) -> None:
            decoder.kept.clear()

    session = Session(decoder, shift=cast("Any", Interrupted()))
    session.feed(list(range(CONTEXT - 1)))
    with pytest.raises(KeyboardInterrupt):
        session.step(CONTEXT - 1)
    logits, n_cached = session.feed(list(range(10)))
    assert n_cached == 0
    assert tokens_of(logits) == list(range(10))


def test_ctrl_c_right_after_a_pass_leaves_nothing_of_it() -> None:
    """Where it comes before the session knows the tokens of the pass, the decoder does not keep them either."""

    class Interrupted(list[int]):
        def extend(self, tokens: Iterable[int]) -> None:
            raise KeyboardInterrupt

    decoder = Decoder()
    session = Session(decoder)
    session.history = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        session.feed([1, 2, 3])
    assert session.history == decoder.kept == []


def test_a_prompt_that_turns_off_keeps_what_is_common() -> None:
    decoder = Decoder()
    session = Session(decoder)
    session.feed([1, 2, 3, 4])
    logits, n_cached = session.feed([1, 2, 7])
    assert n_cached == 2
    assert tokens_of(logits) == [1, 2, 7]


def test_the_same_prompt_computes_its_last_token_again() -> None:
    """Its logits are wanted, and nobody keeps them."""
    decoder = Decoder()
    session = Session(decoder)
    session.feed([1, 2, 3])
    logits, n_cached = session.feed([1, 2, 3])
    assert (n_cached, decoder.n_decoded) == (2, 4)
    assert tokens_of(logits) == [1, 2, 3]


def test_state_that_cannot_be_cut_is_made_anew() -> None:
    decoder = Decoder(can_rewind=False)
    session = Session(decoder)
    session.feed([1, 2, 3, 4])
    assert session.feed([1, 2, 3, 4, 5])[1] == 4, "going on needs no cut"
    logits, n_cached = session.feed([1, 2, 3])
    assert n_cached == 0
    assert tokens_of(logits) == [1, 2, 3]


@pytest.mark.parametrize("can_rewind", [True, False])
def test_after_an_error_it_knows_what_the_decoder_still_holds(can_rewind: bool) -> None:
    decoder = Decoder(can_rewind)
    session = Session(decoder)
    session.feed([1, 2, 3])
    with pytest.raises(TierReadError):
        session.feed([1, 2, 3, 4, 99, 5])
    assert session.history == decoder.kept
    logits, _ = session.feed([1, 2, 3, 4, 5])
    assert tokens_of(logits) == [1, 2, 3, 4, 5]


def test_a_failed_step_can_be_taken_again() -> None:
    decoder = Decoder()
    session = Session(decoder)
    session.feed([1, 2])
    with pytest.raises(TierReadError):
        session.step(99)
    assert tokens_of(session.step(3)) == [1, 2, 3]


@pytest.mark.parametrize("n_tokens", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_computed(n_tokens: int) -> None:
    decoder = Decoder()
    session = Session(decoder)
    session.feed([1])
    with pytest.raises(ContextFull, match=f"prompt of {n_tokens} tokens") as caught:
        session.feed([1] * n_tokens)
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (n_tokens, CONTEXT)
    assert decoder.n_decoded == 1


def test_it_is_full_when_the_context_is() -> None:
    session = Session(Decoder())
    session.feed([1] * (CONTEXT - 1))
    assert not session.is_full
    session.step(1)
    assert session.is_full


@given(prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=CONTEXT - 1), max_size=8), cut=st.booleans())
def test_whatever_came_before_the_decoder_holds_the_prompt(prompts: list[list[int]], cut: bool) -> None:
    """Never one token of the last conversation too many or too few."""
    decoder = Decoder(can_rewind=cut)
    session = Session(decoder)
    for prompt in prompts:
        logits, _ = session.feed(prompt)
        assert tokens_of(logits) == prompt == decoder.kept == session.history
