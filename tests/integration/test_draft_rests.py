"""A draft model that is not asked gives its weights' memory to the model's, and reads them again before it guesses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafted_talks import Talk, check_rows, drafter, streamed
from edge_run.base.errors import Cancelled, EdgeRunError, ModelFileError, TierReadError
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.speculation.draft_weights import DraftWeights
from edge_run.runtime.speculation.drafting import Acceptance, Guesses, WantedGuesses
from edge_run.runtime.streaming.lent_residency import LentResidency
from edge_run.tiers import _libc
from in_child import in_child
from talks import TEXT
from tiny_models import make_model


def guesses(engine: Engine, n_tokens: int) -> Guesses:
    assert engine.draft
    return engine.draft.draft_many({0: TEXT[:n_tokens]}, WantedGuesses(4, 8, Acceptance()))[0]


def held_bytes(engine: Engine) -> int:
    """What of the draft model's weights is in memory."""
    assert engine.draft
    assert engine.draft.weights
    return sum(_libc.resident_bytes(*inside(*place)) for place in engine.draft.weights._places)


def inside(address: int, tensor: object) -> tuple[int, int]:
    size: int = tensor.size_bytes  # type: ignore[attr-defined]
    start, end = -(-address // _libc.PAGE) * _libc.PAGE, (address + size) // _libc.PAGE * _libc.PAGE
    return start, max(0, end - start)


def lender_of(engine: Engine) -> LentResidency:
    assert engine.draft
    lender = engine.draft.make_room.__self__  # type: ignore[attr-defined]
    assert isinstance(lender, LentResidency)
    return lender


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q8_0"])  # of the first, weights are repacked where they lie
@in_child
def test_while_it_rests_weights_of_the_model_have_its_room(folder: Path, quantisation: str) -> None:
    path, draft = make_model("llama", folder, scale=4), drafter("llama", folder, quantisation, scale=4)
    with streamed(path, draft) as engine:
        talk, loans = Talk(engine), lender_of(engine).loans
        assert engine.draft
        weights = engine.draft.weights
        assert weights

        def rest() -> None:
            assert engine.draft
            engine.draft.rest()
            assert held_bytes(engine) == 0

        talk.go_on(TEXT[:200], 4)
        whole = held_bytes(engine)
        rest()
        rest()
        talk.go_on(TEXT[:300], 4)
        assert held_bytes(engine) == whole
        guesses(engine, 100)
        before = guesses(engine, 100)  # its last token read alone, as it will be again
        lender_of(engine).before_pass(1)
        awake = loans.n_loans
        rest()
        lender_of(engine).before_pass(1)
        gained = (loans.n_loans - awake) * loans.loan_bytes
        assert gained >= min(0.9 * weights.size_bytes, (loans.most_loans - awake) * loans.loan_bytes) > 0
        assert before == guesses(engine, 100) != {}
        assert held_bytes(engine) == whole
        talk.go_on(TEXT[:150], 4)
        assert engine.memory_use.peak_bytes <= engine.budget_bytes

    def again(wanted: Talk) -> None:
        for n_tokens in (200, 300, 150):
            wanted.go_on(TEXT[:n_tokens], 4)

    check_rows(path, talk, again)


def short_and_long(talk: Talk) -> None:
    talk.go_on(TEXT[:200], 3)
    talk.go_on(TEXT[:900], 12)


def resting(engine: Engine, talk: Talk) -> DraftWeights:
    """Return the weights, which have left after the first turn of `short_and_long`."""
    talk.go_on(TEXT[:200], 3)
    assert engine.draft
    assert engine.draft.weights
    engine.draft.rest()
    return engine.draft.weights


def refused(engine: Engine, error: type[EdgeRunError]) -> None:
    """Nothing is guessed, and the weights hold no memory and no room."""
    with pytest.raises(error):
        guesses(engine, 100)
    assert held_bytes(engine) == 0
    assert not lender_of(engine)._held_idle_bytes


@in_child
def test_a_stop_while_weights_come_back_ends_the_guessing_only(folder: Path) -> None:
    path, draft = make_model("llama", folder), drafter("llama", folder, "Q4_0")
    with streamed(path, draft) as engine:
        talk = Talk(engine)
        weights, n_left = resting(engine, talk), 3
        check = weights._check

        def stop() -> None:
            nonlocal n_left
            n_left -= 1
            if not n_left:
                raise Cancelled("stopped")

        weights._check = stop
        refused(engine, Cancelled)
        weights._check = check
        talk.go_on(TEXT[:900], 12)
        assert guesses(engine, 100)
    check_rows(path, talk, short_and_long)


def happens_to(draft: Path, what: str) -> None:
    """It is removed, written anew, or cut off."""
    if what == "removed":
        draft.unlink()
    elif what == "replaced":
        os.utime(draft, (1, 1))
    else:
        os.truncate(draft, draft.stat().st_size - 4096)


@pytest.mark.parametrize(
    ("what", "error"), [("removed", TierReadError), ("replaced", ModelFileError), ("cut off", ModelFileError)]
)
@in_child
def test_a_file_that_is_not_there_any_more_ends_the_guessing_and_nothing_else(
    folder: Path, what: str, error: type[EdgeRunError]
) -> None:
    path, draft = make_model("llama", folder), drafter("llama", folder, "Q4_0")
    with streamed(path, draft) as engine:
        talk = Talk(engine)
        resting(engine, talk)
        happens_to(draft, what)
        refused(engine, error)
        talk.go_on(TEXT[:900], 12)
        assert "guessing failed" in talk.session.speculation().reason
        assert engine.memory_use.peak_bytes <= engine.budget_bytes
    check_rows(path, talk, short_and_long)
