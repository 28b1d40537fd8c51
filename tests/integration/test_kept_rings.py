"""Sliding windows in the prompt cache: a ring is kept only under passes that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import Cancelled
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.speculation.session import SpeculativeSession
from in_child import in_child
from kept_prompts import TOKENS, opened, talk
from tiny_models import make_model


@contextmanager
def cancelled_in_pass(session: Session, number: int) -> Iterator[None]:
    """Have the `number`-th of the next passes cancelled once llama.cpp has cells for it."""
    driver = session._decoder._driver
    before, passes = driver.before_pass, iter(range(1, number + 1))

    def cancel(shape: object) -> None:
        before(shape)
        if next(passes) == number:
            driver.interrupt.cancel()

    driver.before_pass = cancel
    with pytest.raises(Cancelled):
        yield
    driver.before_pass = before


def go_on(session: Session, text: Sequence[int]) -> tuple[list[np.ndarray], int]:
    """The logits after `text` and after tokens that follow, and how many tokens were there."""
    logits, cached = session.feed([*text, *TOKENS[:20]])
    return [logits.copy(), *(session.step(token).copy() for token in TOKENS[:100])], cached


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("what", ["first pass", "second pass", "token"])
@in_child
def test_a_conversation_goes_on_after_a_pass_that_was_taken_back(what: str, is_exact: bool, tmp_path: Path) -> None:
    """The pass lies at the end and at the beginning of the ring, which has 256 cells; windows have 64 tokens."""
    path, kept = make_model("gemma3", tmp_path), tmp_path / "kept"
    with opened(path, kept, exact=is_exact) as (session, keeper, _):
        assert keeper
        keeper.keeps_answers = True
        talk(session, TOKENS[: {"first pass": 480, "second pass": 440, "token": 511}[what]], 0)
        before = list(session.history)
        with cancelled_in_pass(session, 1 + (what == "second pass")):
            session.step(1) if what == "token" else session.feed([*session.history, *TOKENS[600:700]])
        talk(session, [*(session.history or before), *TOKENS[700:720]], 0)
        keeper.flush()
        rows, text = keeper.rows, list(session.history)
        wanted = go_on(session, text)
    with opened(path, kept, exact=is_exact) as (session, keeper, said):
        assert keeper
        keeper.expect(rows)
        found = go_on(session, text)
        assert not said
    if what == "token" or is_exact:  # which leaves its cell to the next one; or all was read anew
        assert found[1] == len(text)
        assert all(map(np.array_equal, found[0], wanted[0]))
    else:  # what was kept of the prompt is gone on with
        assert found[1] < len(text)
    if what != "token" or is_exact:
        with opened(path, None, exact=is_exact) as (session, _, _):
            wanted = go_on(session, text)
    assert all(map(np.array_equal, found[0], wanted[0]))


@in_child
def test_a_conversation_goes_on_after_guesses_that_did_not_come_true(tmp_path: Path) -> None:
    path, kept = make_model("gemma3", tmp_path), tmp_path / "kept"
    options: dict[str, Any] = {"speculate": "ngram", "outputs_per_pass": 8}
    with opened(path, kept, **options) as (session, keeper, _):
        assert keeper
        assert isinstance(session, SpeculativeSession)
        session._guesses._control.best = lambda offers: len(offers) - 1  # type: ignore[method-assign]
        keeper.keeps_answers = True
        session.feed(TOKENS[:40] * 8)
        for token in TOKENS[:20]:
            session.step(token)
        assert session._holds_guesses
        session.finish()
        keeper.flush()
        rows, text = keeper.rows, list(session.history)
        wanted = session.feed([*text, *TOKENS[100:120]])[0].copy()
    with opened(path, kept, **options) as (session, keeper, said):
        assert keeper
        keeper.expect(rows)
        logits, cached = session.feed([*text, *TOKENS[100:120]])
        assert not said
        assert cached == len(text)
        assert np.array_equal(logits, wanted)
