"""What another answer, a closed model or a busy thread means for batches, and for tasks that share their passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from at_once import GREEDY, OPTIONS, PROMPT
from edge_run import (
    AsyncModel,
    Cancelled,
    ConfigError,
    Model,
    Request,
    SamplingConfig,
    Turn,
)
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.batched_answers import Event
from edge_run.runtime.generation.stream import Stream
from in_child import in_child


@pytest.fixture
def model(model_of_two: Model) -> Model:
    return model_of_two


def test_a_batch_that_another_answer_ended_touches_nothing(model: Model) -> None:
    """It wrote over what the next answer takes for its own."""
    wanted = model.generate(f"{PROMPT} and one day", max_tokens=12, temperature=0).result().text
    batch = model.open_batch()
    batch.submit(model.begin(Request("Another one", 20)), Turn())
    model.generate(PROMPT, max_tokens=8, temperature=0).result()
    assert batch.is_closed
    with pytest.raises(Cancelled, match="another answer"):
        batch.submit(model.begin(Request("Another one", 20)), Turn())
    with pytest.raises(Cancelled, match="another answer"):
        batch.advance()
    batch.drop(0)
    batch.drop_all()
    batch.close()
    again = model.generate(f"{PROMPT} and one day", max_tokens=12, temperature=0).result()
    assert again.text == wanted
    assert again.cached_tokens > 0
    batch = model.open_batch()
    batch.close()
    with pytest.raises(ConfigError, match="closed"):
        batch.advance()


def test_a_thread_that_comes_when_a_batch_has_just_been_opened_ends_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both went on, in the same sequences."""
    do, streams = model._workplace.do, list[Stream]()

    def do_and_let_in(work: Callable[[], Any]) -> Any:
        found = do(work)
        monkeypatch.undo()
        streams.append(model.generate(PROMPT, max_tokens=8, temperature=0))
        return found

    monkeypatch.setattr(model._workplace, "do", do_and_let_in)
    batch = model.open_batch()
    with pytest.raises(Cancelled, match="another answer"):
        batch.advance()
    assert streams[0].result().finish_reason == "length"


def test_a_batch_that_was_left_is_ended_by_the_next_answer(model: Model) -> None:
    wanted = model.generate(PROMPT, max_tokens=8, temperature=0).result().text
    batch = model.open_batch()
    batch.submit(model.begin(Request("Another one", 20)), Turn())
    batch.advance()
    del batch
    assert model.generate(PROMPT, max_tokens=8, temperature=0).result().text == wanted


def test_a_pass_ends_at_once_where_all_that_are_left_were_cancelled(model: Model) -> None:
    """Of two that were cancelled in one pass, neither was alone, and the pass went on for nobody."""
    wanted = model.generate(PROMPT, max_tokens=8, temperature=0).result().text
    with model.open_batch() as batch:
        first, second = (batch.submit(model.begin(Request("Another one", 20)), Turn()) for _ in range(2))
        batch.advance()
        interrupt, is_set = model._engine.interrupt, list[bool]()
        for step, number in ((batch.cancel, first), (batch.cancel, second), (batch.drop, first), (batch.drop, second)):
            step(number)
            is_set.append(interrupt.is_set)
        assert is_set == [False, True, False, False]
        batch.submit(model.begin(Request(PROMPT, 8, SamplingConfig(temperature=0))), Turn())
        texts = [event.piece.text for _ in range(99) if not batch.is_idle for event in batch.advance() if event.piece]
    assert "".join(texts) == wanted


def test_who_cancels_all_ends_all_beside_one_that_was_cancelled_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that one ended."""
    with model.open_batch() as batch:
        numbers = [batch.submit(model.begin(Request("Another one", 20)), Turn()) for _ in range(2)]
        batch.advance()

        def cancel(tokens: object) -> None:
            batch.cancel(numbers[0])
            model.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(model._engine.decoder, "_prepare", cancel)
            ended = batch.advance()
        assert [event.request for event in ended if reason_of(event) == "cancelled"] == numbers


def test_a_cancel_in_the_last_pass_of_a_request_ends_no_later_one(model: Model) -> None:
    """The interrupt stayed set: it ended what came next."""
    interrupt = model._engine.interrupt
    with model.open_batch() as batch:
        last = batch.submit(model.begin(Request("Another one", 1)), Turn())
        answers = batch._answers
        end = answers._end

        def end_cancelled(number: int, why: str) -> Event:
            if number == last:
                batch.cancel(number)  # as from another thread, when its pass is computed
            return end(number, why)

        answers._end = end_cancelled  # type: ignore[method-assign]
        (ended,) = [event for _ in range(9) if not batch.is_idle for event in batch.advance() if event.is_last]
        assert reason_of(ended) == "length"
        assert interrupt.is_set
        batch.submit(model.begin(Request(PROMPT, 8, SamplingConfig(temperature=0))), Turn())
        events = [event for _ in range(99) if not batch.is_idle for event in batch.advance()]
        assert reason_of(events[-1]) == "length"
        batch.cancel(last)  # which has ended, and means nothing
        assert not interrupt.is_set
        batch.submit(model.begin(Request(PROMPT, 8, SamplingConfig(temperature=0))), Turn())
        batch.cancel(last)
        events = [event for _ in range(99) if not batch.is_idle for event in batch.advance()]
        assert reason_of(events[-1]) == "length"


def test_a_cancel_that_finds_nothing_to_end_ends_no_later_request(model: Model) -> None:
    """It ended the next request of a batch, which came after it; an answer alone it did not."""
    with model.open_batch() as batch:
        model.cancel()
        batch.submit(model.begin(Request(PROMPT, 2, SamplingConfig(temperature=0))), Turn())
        events = [event for _ in range(9) if not batch.is_idle for event in batch.advance()]
    assert reason_of(events[-1]) == "length"


def reason_of(event: Event) -> str:
    """Return why the answer ended whose last event this is."""
    assert event.piece is not None
    assert event.piece.generation is not None
    return event.piece.generation.finish_reason


@in_child
def test_a_batch_keeps_its_model_open_and_knows_when_it_is_closed(kit: Path) -> None:
    """Each of these ended the process."""

    def make() -> Batch:
        model = Model(kit, **OPTIONS)
        batch = model.open_batch()
        batch.submit(model.begin(Request(PROMPT, 4)), Turn())
        return batch

    batch = make()
    events = [event for _ in range(9) for event in ([] if batch.is_idle else batch.advance())]
    assert events[-1].is_last
    model = Model(kit, **OPTIONS)
    batch, answer = model.open_batch(), model.begin(Request(PROMPT, 4))
    model.close()
    for action in (lambda: batch.submit(answer, Turn()), batch.advance):
        with pytest.raises(ConfigError, match="closed"):
            action()
    batch.close()


@pytest.mark.anyio
async def test_tasks_go_on_where_the_owner_of_their_model_ended_their_batch(model: Model) -> None:
    async with AsyncModel.of(model) as shared:
        pieces = shared.generate(PROMPT, max_tokens=50, temperature=0)
        await anext(pieces)
        wanted = model.generate(PROMPT, max_tokens=8, temperature=0).result().text
        with pytest.raises(Cancelled):
            async for _ in pieces:
                pass
        found = [piece.text async for piece in shared.generate(PROMPT, max_tokens=8, temperature=0)]
        assert "".join(found) == wanted


@pytest.mark.anyio
@pytest.mark.parametrize("sequences", [1, 2])
async def test_tasks_wait_for_a_thread_that_is_at_work_beside_them(kit: Path, sequences: int) -> None:
    """All their answers were lost."""
    async with AsyncModel(kit, **{**OPTIONS, "sequences": sequences}) as shared:
        has_begun, texts = threading.Event(), list[str]()
        wanted = (await shared.complete(PROMPT, **GREEDY)).text

        def work() -> None:
            has_begun.set()
            time.sleep(0.1)

        async def answer() -> None:
            pieces = shared.generate(PROMPT, **GREEDY)
            text = (await anext(pieces)).text
            thread = threading.Thread(target=until_done, args=(partial(shared.model._workplace.do, work),))
            thread.start()
            assert await anyio.to_thread.run_sync(has_begun.wait, 60)
            texts.append("".join([text, *[piece.text async for piece in pieces]]))
            thread.join(60)

        async with anyio.create_task_group() as group:
            for _ in range(sequences):
                group.start_soon(answer)
        assert texts == [wanted] * sequences


def until_done(work: Callable[[], object]) -> None:
    """Ask for `work` until it is not refused."""
    while True:
        try:
            work()
            return
        except ConfigError:
            time.sleep(0.0001)
