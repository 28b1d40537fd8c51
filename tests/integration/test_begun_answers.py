"""What an answer holds is freed where it cannot begin, and leaving a conversation computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run import Model, TierReadError
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Request, Turn
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.speculation.session import SpeculativeSession
from small_engines import PROMPT, open_engine
from tiny_models import make_model


def test_an_answer_that_cannot_begin_is_closed(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closed = list[Continuation](), list[Continuation]()
    begin, close = Model.begin, Continuation.close

    def fail(self: Session) -> None:
        raise TierReadError("the drive fails")

    def note(self: Model, request: Request) -> Continuation:
        begun.append(begin(self, request))
        return begun[-1]

    def note_closed(self: Continuation) -> None:
        closed.append(self)
        close(self)

    with Model(kit, context_tokens=256, threads=1) as model:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "forget", fail)
            patch.setattr(Model, "begin", note)
            patch.setattr(Continuation, "close", note_closed)
            with pytest.raises(TierReadError, match="the drive fails"):
                model._start(Request("Once", 5, turn=Turn(salt="another")))
        assert len(begun) == 1
        assert closed == begun
        assert model.generate("Once", max_tokens=5).result().completion_tokens == 5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_conversation_with_guesses_is_left_without_computing(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(make_model(name, folder), speculate="ngram", branches=0) as engine:
        session = open_session(engine)
        assert isinstance(session, SpeculativeSession)
        wanted = session.feed(PROMPT)[0].copy()
        session.step(PROMPT[0])
        session._holds_guesses = True  # as after a pass that verified some
        session.history += [1, 2]  # which the context has lost, as that of a sliding window may
        with monkeypatch.context() as patch:
            patch.setattr(LocalDecoder, "decode", lambda *_: pytest.fail("it computes what is left anyway"))
            session.forget()
        assert (session.history, session._holds_guesses) == ([], False)
        assert (session.feed(PROMPT)[0] == wanted).all()
