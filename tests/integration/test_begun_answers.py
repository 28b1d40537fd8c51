"""What an answer holds is freed where it cannot begin, and leaving a conversation computes nothing."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest

from edge_run import Cancelled, ConfigError, KernelError, Model, SamplingConfig, TierReadError
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Request, Turn
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.grammars.room import GrammarRoom, RoomedGrammar
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


def test_an_answer_that_others_leave_no_place_for_is_closed(
    model_of_two: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may come between its beginning and its place among the others; it was begun anew then."""
    begun, begin = list[Continuation](), Model.begin

    def note(self: Model, request: Request) -> Continuation:
        begun.append(begin(self, request))
        return begun[-1]

    def refuse(self: BatchedAnswers, answer: Continuation, turn: Turn) -> int:
        raise Cancelled("another answer was begun")

    monkeypatch.setattr(Model, "begin", note)
    stream = model_of_two.generate_many(["Once"], max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(BatchedAnswers, "submit", refuse)
        with pytest.raises(Cancelled, match="another answer"):
            next(stream)
    (answer,) = begun
    with pytest.raises(ConfigError, match="this answer was closed"):
        answer.begin()
    assert len(stream.results()) == 1


@pytest.mark.parametrize("error", [TierReadError("the drive fails"), KeyboardInterrupt()])
def test_an_answer_is_whole_whatever_becomes_of_what_a_next_one_goes_on_with(
    error: BaseException, model_of_two: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last piece was lost, and its figures."""

    def fail(self: Session) -> None:
        raise error

    wanted = model_of_two.complete("Once", max_tokens=3, temperature=0)
    stream = model_of_two.generate("Once", max_tokens=3, temperature=0)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "finish", fail)
        with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
            stream.result()
    assert stream.result().text == stream.text == wanted.text


def test_a_mark_that_cannot_be_leaves_no_grammar_open(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had its room for as long as the model was open."""

    def refuse(self: Model, text: str) -> list[int]:
        raise ConfigError(f"{text}: cannot be written")

    with Model(kit, context_tokens=256, threads=1) as model:
        monkeypatch.setattr(Model, "_control_token", refuse)
        monkeypatch.setattr(GrammarRoom, "open", lambda *_: pytest.fail("nobody would close it"))
        with pytest.raises(ConfigError, match="cannot be written"):
            model.begin(Request("Once", 5, SamplingConfig(grammar='root ::= "a"'), marks=["<|mark|>"]))


def test_an_answer_that_nobody_goes_on_with_gives_back_what_it_holds(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grammar had its room for as long as the model was open."""
    freed = list[RoomedGrammar]()

    def note(grammar: RoomedGrammar) -> None:
        freed.append(grammar)

    with Model(kit, context_tokens=256, threads=1) as model:
        monkeypatch.setattr(RoomedGrammar, "close", note)
        model.begin(Request("Once", 5, SamplingConfig(grammar='root ::= "a"')))
        gc.collect()
    assert len(freed) == 1


def test_a_batch_whose_sequences_cannot_be_emptied_closes_its_answers(
    model_of_two: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their grammars had their room for as long as the model was open."""

    def fail(sequence: int, position: int) -> int:
        raise KernelError("the run is broken off")

    batch, answer = model_of_two.open_batch(), model_of_two.begin(Request("Once", 5))
    batch.submit(answer, Turn())
    batch.advance()
    with monkeypatch.context() as patch:
        patch.setattr(model_of_two._engine.decoder, "rewind", fail)
        with pytest.raises(KernelError, match="broken off"):
            batch.close()
    assert batch.is_closed
    assert batch.is_idle
    with pytest.raises(ConfigError, match="this answer was closed"):
        answer.begin()


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
