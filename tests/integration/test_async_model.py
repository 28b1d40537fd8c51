"""`AsyncModel`: streaming, queueing and cancelling, on asyncio and trio's common ground (anyio)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from edge_run import AsyncModel, Cancelled, ConfigError, Model, NotSupported, Piece
from edge_run.base.interrupt import Interrupt
from kit_models import streamed

PROMPT = "Once upon a time"
pytestmark = pytest.mark.anyio


async def test_streams_the_text_of_model(grown: Path) -> None:
    with Model(grown, **streamed()) as model:
        wanted = model.generate(PROMPT, max_tokens=8, temperature=0).result().text
    async with AsyncModel(grown, **streamed()) as model:
        pieces = [piece async for piece in model.generate(PROMPT, max_tokens=8, temperature=0)]
        assert model.plan.mode == "streamed"
        assert model.stats.completion_tokens == 8
    assert "".join(piece.text for piece in pieces) == wanted
    assert pieces[-1].generation is not None


async def test_a_cancelled_task_ends_its_generation_and_the_next_one_is_right(grown: Path) -> None:
    async with AsyncModel(grown, **streamed()) as model:
        wanted = [p.text async for p in model.generate(PROMPT, max_tokens=6, temperature=0)]
        for delay_s in (0.0, 0.02, 0.2):
            with anyio.move_on_after(delay_s) as scope:
                async for _ in model.generate(PROMPT + " and", temperature=0):
                    pass
            assert scope.cancelled_caught
            assert [p.text async for p in model.generate(PROMPT, max_tokens=6, temperature=0)] == wanted


async def test_generations_queue(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        texts: list[str] = []

        async def generate() -> None:
            texts.append("".join([p.text async for p in model.generate(PROMPT, max_tokens=10, temperature=0)]))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(generate)
    assert len(texts) == 4
    assert len(set(texts)) == 1


async def test_leaving_the_loop_frees_the_model(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        pieces = model.generate(PROMPT, temperature=0)
        async for _ in pieces:
            break
        await pieces.aclose()
        async for _ in model.generate(PROMPT, temperature=0):
            break  # and this one is left to the garbage collector
        with anyio.fail_after(60):
            assert [p async for p in model.generate(PROMPT, max_tokens=2)]


async def test_an_answer_that_is_left_before_its_end_holds_up_nobody(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        whole = await model.complete(PROMPT, max_tokens=12, temperature=0)
        async with model.generate(PROMPT, max_tokens=12, temperature=0) as left:
            async for _ in left:
                break
            assert repr(left) == f"<AsyncStream: {len(left.token_ids)} tokens, not finished>"
        with anyio.fail_after(60):
            stream = model.generate(PROMPT, max_tokens=12, temperature=0)
            assert (await stream.result()).text == whole.text
        assert (stream.text, stream.token_ids) == (whole.text, tuple(whole.token_ids))
        assert stream.generation
        assert repr(stream) == "<AsyncStream: 12 tokens, length>"
        assert left.generation is None
        assert left.text
        assert whole.text.startswith(left.text)
        with pytest.raises(Cancelled):
            await left.result()


async def test_leaving_the_model_while_a_generator_is_half_way(kit: Path) -> None:
    """It holds the turn, and nobody will ever ask it for another piece: waiting for it would hang for ever."""
    with anyio.fail_after(60):
        async with AsyncModel(kit, context_tokens=256, threads=1) as model:
            pieces = model.generate(PROMPT, temperature=0)
            await pieces.__anext__()
        with pytest.raises(ConfigError, match="closed"):
            await pieces.__anext__()
    with pytest.raises(ConfigError, match="async with"):
        model.generate(PROMPT)


async def test_leaving_the_model_while_another_task_computes(grown: Path) -> None:
    """The pass is ended, and nothing is unmapped under it."""
    pieces: list[Piece] = []
    prompt = [5 + 7 * number % 200 for number in range(1900)]  # it is read yet, however late this task looks
    options = {**streamed(), "context_tokens": 2048}
    with anyio.fail_after(100):
        async with anyio.create_task_group() as group, AsyncModel(grown, **options) as model:

            async def generate() -> None:
                async for piece in model.generate(prompt, temperature=0):
                    pieces.append(piece)

            group.start_soon(generate)
            while (progress := model.progress) is None:  # noqa: ASYNC110 - no event is set in the middle of a pass
                await anyio.sleep(0.001)
            assert progress.all_tokens == len(prompt)
    generation = pieces[-1].generation
    assert generation is not None
    assert (generation.finish_reason, generation.completion_tokens) == ("cancelled", 0)


async def test_a_task_that_is_cancelled_while_it_queues_leaves_the_queue(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        ended: list[str] = []

        async def generate(name: str, n_tokens: int, timeout_s: float) -> None:
            with anyio.move_on_after(timeout_s) as scope:
                async for _ in model.generate(PROMPT, max_tokens=n_tokens, temperature=0, repeat_last_n=0):
                    pass
            ended.append(f"{name} cancelled" if scope.cancelled_caught else name)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(generate, "first", 150, 60)
                group.start_soon(generate, "second", 150, 0.01)
                group.start_soon(generate, "third", 2, 60)
    assert ended == ["second cancelled", "first", "third"]


async def test_an_error_in_the_loop_ends_the_generation(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:

        async def fail() -> None:
            async for _ in model.generate(PROMPT, temperature=0):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        with anyio.fail_after(60):
            assert [piece async for piece in model.generate(PROMPT, max_tokens=2)]


async def test_chat(kit: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with AsyncModel(kit, context_tokens=256, threads=1, chat_template=template) as model:
        messages = [{"role": "user", "content": PROMPT}]
        answer = await model.chat(messages, max_tokens=4, temperature=0)
        assert model.model.has_chat_template
        assert answer.prompt_tokens == len(model.model.prompt_tokens(model.model.chat_prompt(messages)))
        assert (await model.complete(PROMPT, max_tokens=4, temperature=0)).text == answer.text
        parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
        assert (await model.chat(parts, max_tokens=4, temperature=0)).text == answer.text
        pieces = [piece async for piece in model.stream_chat(messages, max_tokens=4, temperature=0)]
    assert answer.completion_tokens == 4
    assert "".join(piece.text for piece in pieces) == answer.text


async def test_errors_are_those_of_model(kit: Path) -> None:
    model = AsyncModel(kit, context_tokens=256, threads=1)
    with pytest.raises(ConfigError, match="async with"):
        _ = model.plan
    async with model:
        with pytest.raises(ConfigError, match="empty"):
            async for _ in model.generate([]):
                pass
        with pytest.raises(ConfigError, match="grammar"):
            async for _ in model.generate("x", grammar="root ::= ("):
                pass


async def test_who_leaves_when_the_model_has_ended_its_answer_ends_no_other(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=1024, sequences=2) as model:
        reasons: list[str] = []
        has_ended = anyio.Event()

        async def read_all() -> None:
            async for piece in model.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True):
                if model.stats.generations:
                    has_ended.set()
                if piece.generation is not None:
                    reasons.append(piece.generation.finish_reason)

        async with anyio.create_task_group() as group:
            group.start_soon(read_all)
            short = model.generate(PROMPT, max_tokens=2, temperature=0, ignore_eos=True)
            async for _ in short:
                await has_ended.wait()  # with its second token, which nobody reads
                break
            await short.aclose()
        assert reasons == ["length"]


async def test_an_answer_of_a_model_that_was_closed_is_cancelled(kit: Path) -> None:
    model = AsyncModel(kit, context_tokens=256, sequences=2)
    async with model:
        pieces = model.generate(PROMPT, max_tokens=50, temperature=0, ignore_eos=True)
        async for _ in pieces:
            break
    with anyio.fail_after(60), pytest.raises((Cancelled, ConfigError)):
        async for _ in pieces:
            pass


async def test_a_model_that_was_closed_can_be_opened_again(kit: Path) -> None:
    model = AsyncModel(kit, context_tokens=256, sequences=2)
    for _ in range(2):
        async with model:
            found = [piece async for piece in model.generate(PROMPT, max_tokens=3, temperature=0)]
        assert found[-1].generation


async def test_vectors_that_a_model_cannot_make_end_no_answer(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, sequences=2) as model:
        pieces = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        found = [await anext(pieces)]
        with pytest.raises(NotSupported):
            await model.embed(PROMPT)
        found += [piece async for piece in pieces]
        assert found[-1].generation is not None
        assert found[-1].generation.completion_tokens == 20


async def test_a_task_that_would_wait_for_itself_is_told(kit: Path) -> None:
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        with anyio.fail_after(60):
            pieces = model.generate(PROMPT, max_tokens=50, temperature=0, ignore_eos=True)
            await anext(pieces)
            for ask in (lambda: anext(model.generate("x")), lambda: model.embed("x")):
                with pytest.raises(ConfigError, match=r"aclose\(\)"):
                    await ask()
            found: list[Piece] = []

            async def ask_too() -> None:
                found.extend([piece async for piece in model.generate(PROMPT, max_tokens=2, temperature=0)])

            async with anyio.create_task_group() as group:  # another task waits for its turn, as ever
                group.start_soon(ask_too)
                await anyio.sleep(0.05)
                assert not found
                await pieces.aclose()
            assert found
            assert [piece async for piece in model.generate(PROMPT, max_tokens=2)]


@pytest.mark.parametrize("sequences", [1, 2])
async def test_options_may_be_such_as_are_read_once(kit: Path, sequences: int) -> None:
    """Stop strings of a generator were ignored where answers run one after the other."""
    async with AsyncModel(kit, context_tokens=256, threads=1, sequences=sequences) as model:
        text = (await model.complete(PROMPT, max_tokens=12, temperature=0)).text
        found = await model.complete(PROMPT, max_tokens=12, temperature=0, stop=(one for one in [text[3:5]]))  # type: ignore[arg-type]
        assert (found.finish_reason, found.text) == ("stop", text[: text.index(text[3:5])])


async def test_answers_one_after_the_other_are_of_several_keys_in_turns(kit: Path) -> None:
    """Many of one key held up those of all others."""
    order = list[str]()

    async def answer(key: str, priority: int) -> None:
        await model.complete(PROMPT, max_tokens=24, key=key, priority=priority, ignore_eos=True)
        order.append(key)

    async with AsyncModel(kit, context_tokens=256, threads=1) as model, anyio.create_task_group() as group:
        for key, priority in (*5 * [("many", 0)], ("one", 0), ("first", 1)):
            group.start_soon(answer, key, priority)
            await anyio.lowlevel.checkpoint()  # it takes its place
    assert order[1] == "first", order
    assert order.index("one") <= 3
    assert len(order) == 7


async def test_an_interrupt_of_the_caller_serves_several_openings(kit: Path) -> None:
    """The second one raised Cancelled."""
    model = AsyncModel(kit, context_tokens=256, threads=1, interrupt=Interrupt())
    for _ in range(2):
        async with model:
            assert (await model.complete(PROMPT, max_tokens=2)).finish_reason == "length"


async def test_a_model_that_is_open_is_not_entered_again(kit: Path) -> None:
    model = AsyncModel(kit, context_tokens=256, threads=1)
    async with model:
        with pytest.raises(ConfigError, match="is open already"):
            async with model:
                pass
        assert [piece async for piece in model.generate(PROMPT, max_tokens=2)]
        left = model.generate(PROMPT, max_tokens=50, ignore_eos=True)
        await anext(left)
    async with model:
        with anyio.fail_after(60):  # an answer of the first opening held up all of the second one
            assert [piece async for piece in model.generate(PROMPT, max_tokens=2)]
        await left.aclose()


async def test_an_opening_that_is_cancelled_ends(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = list[Interrupt]()

    def open_slowly(*_: object, interrupt: Interrupt, **__: object) -> None:
        interrupts.append(interrupt)
        while not interrupt.is_set:
            time.sleep(0.01)
        raise Cancelled("the opening was cancelled")

    async def cancel_when_open(n_openings: int, scope: anyio.CancelScope) -> None:
        while len(interrupts) < n_openings:  # noqa: ASYNC110 - it is another thread that opens
            await anyio.sleep(0.01)
        scope.cancel()

    monkeypatch.setattr("edge_run.runtime.generation.async_model.Model", open_slowly)
    model, own = AsyncModel(kit), Interrupt()
    for number, each in enumerate((model, AsyncModel(kit, interrupt=own)), 1):
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                with anyio.CancelScope() as scope:
                    group.start_soon(cancel_when_open, number, scope)
                    async with each:
                        pytest.fail("it was opened")
    assert interrupts[1] is own
    monkeypatch.undo()
    async with model:  # its next opening has nothing to do with that
        assert [piece async for piece in model.generate(PROMPT, max_tokens=2)]


@pytest.mark.parametrize("sequences", [1, 2])
async def test_what_cannot_be_is_refused_at_once(kit: Path, sequences: int) -> None:
    async with AsyncModel(kit, context_tokens=256, sequences=sequences) as model:
        with pytest.raises(ConfigError, match="temperature"):
            model.generate(PROMPT, temperature=-1)
        with pytest.raises(ConfigError, match="role"):
            model.stream_chat("Hi")  # type: ignore[arg-type]


async def test_what_an_open_model_expects_is_worked_out_in_its_thread(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans and profiles take their time, in which the loop of the tasks would stand still."""
    threads: list[str] = []
    for name in ("expect", "forecast"):
        monkeypatch.setattr(Model, name, lambda *_, **__: threads.append(threading.current_thread().name))
    async with AsyncModel(kit, context_tokens=256, threads=1) as model:
        await model.expect()
        await model.forecast(128)
        assert model.notices == ()
        assert model.numerics.threads == 1
    assert threads == ["edge-run-model"] * 2
