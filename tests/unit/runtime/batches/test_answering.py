"""What is the result of one request of a batch, and what ends the run: all that others would meet too."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

from edge_run.base.errors import (
    BudgetError,
    ConfigError,
    ContextFull,
    EdgeRunError,
    KernelError,
    LogitsError,
    ModelFileError,
    NotSupported,
    PackedFileError,
    ProtocolError,
    TierReadError,
)
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.batches import answering
from edge_run.runtime.batches.answering import CHAT, COMPLETIONS, BatchResult, PlacesHere
from edge_run.runtime.batches.input_file import BatchRequest
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults, Preparing, ServedModel
from edge_run.runtime.server.counts import Counts
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal

REQUEST = BatchRequest("a", "/v1/completions", {"prompt": "x"})
OF_ALL = (TierReadError, BudgetError, KernelError)


def answer(monkeypatch: pytest.MonkeyPatch, step: str, error: EdgeRunError) -> BatchResult:
    """Answer a request, where `step` raises `error`; assert that its place is free again."""

    async def prepare(*_: object) -> Any:
        job = SimpleNamespace(check=lambda context_tokens: None, n_answers=1)
        return job, SimpleNamespace(begin=lambda served, job: b"")

    async def fail(*_: object, **how: object) -> Any:
        raise error

    monkeypatch.setattr(answering, "_job", prepare)
    monkeypatch.setattr(answering, step, fail)
    model = SimpleNamespace(most_parallel=1, context_tokens=64)
    places = PlacesHere(SimpleNamespace(model=model, answering=None))  # type: ignore[arg-type]

    async def main() -> BatchResult:
        place = await places.take(1)
        try:
            return await place(REQUEST)
        finally:
            with anyio.fail_after(60):
                for _ in range(places.most):
                    await places.take(1)

    return anyio.run(main)


@pytest.mark.parametrize("kind", [*OF_ALL, ModelFileError, PackedFileError, ProtocolError])
def test_what_ends_a_pass_is_no_result(monkeypatch: pytest.MonkeyPatch, kind: type[EdgeRunError]) -> None:
    with pytest.raises(kind, match="the file changed"):
        answer(monkeypatch, "generate", kind("the file changed"))


@pytest.mark.parametrize("kind", OF_ALL)
def test_what_the_machine_lacks_is_no_result(monkeypatch: pytest.MonkeyPatch, kind: type[EdgeRunError]) -> None:
    with pytest.raises(kind):
        answer(monkeypatch, "_job", kind("no more"))


@pytest.mark.parametrize(
    ("step", "error", "status"),
    [
        ("_job", ConfigError("no such thing"), 400),
        ("_job", ModelFileError("chat template of the model file: takes longer than 10 s"), 500),
        ("generate", ConfigError("no such grammar"), 400),
        ("generate", ContextFull("too long"), 400),
        ("generate", NotSupported("no token fits"), 400),
        ("generate", LogitsError("the best logit is nan"), 500),
    ],
)
def test_what_is_wrong_with_one_request_is_its_result(
    monkeypatch: pytest.MonkeyPatch, step: str, error: EdgeRunError, status: int
) -> None:
    found = answer(monkeypatch, step, error)
    assert found.status == status
    assert str(error) in json.dumps(found.body)


def test_a_model_is_called_as_the_server_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    async def note(served: Any, request: BatchRequest) -> Any:
        names.append(served.name)
        raise Refusal(400, "enough")

    monkeypatch.setattr(answering, "_job", note)
    monkeypatch.setattr(answering, "AsyncModel", SimpleNamespace(of=nullcontext))

    async def main() -> None:
        for name in ("x.gguf", "y-00001-of-00003.gguf"):
            model: Any = SimpleNamespace(path=Path(name), most_parallel=1)
            async with PlacesHere.of(model, SamplingConfig()) as places:
                place = await places.take(1)
                assert (await place(REQUEST)).status == 400

    anyio.run(main)
    assert names == ["x", "y"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "functions": [{}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "modalities": ["audio"]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (COMPLETIONS, {"prompt": [1], "cache_salt": "x"}),
    ],
)
def test_what_a_server_refuses_at_once_is_refused(url: str, body: dict[str, Any]) -> None:
    """And in words that do not speak of one."""

    async def prepare(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    model = SimpleNamespace(keeps_prompts=True, check_tokens=lambda *_: None, context_tokens=64)
    served = ServedModel("x", cast(Any, model), cast(Any, None), AnswerDefaults(), Preparing(), Counts())
    served.prepare = prepare  # type: ignore[method-assign]

    async def main() -> None:
        with pytest.raises(Refusal) as refused:
            await answering._job(served, BatchRequest("a", url, body))
        assert refused.value.param
        assert refused.value.message.startswith(refused.value.param)
        assert "server" not in refused.value.message

    anyio.run(main)


def test_a_prompt_that_is_too_long_is_refused_in_words_that_speak_of_no_server() -> None:
    with pytest.raises(ContextFull, match=r"shorten it, or give more context .context_tokens=") as refused:
        Job([1] * 9, SamplingConfig()).check(8)
    assert "server" not in str(refused.value)


def test_where_the_drive_is_full_a_request_waits_for_the_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BatchedAnswers` ends the one that began last, so that the others go on: that is no end of the run."""
    began, full = list[str](), TierReadError("no room", errno=errno.ENOSPC)

    async def prepare(served: object, request: BatchRequest) -> Any:
        job = SimpleNamespace(check=lambda context_tokens: None, name=request.custom_id, n_answers=1)
        return job, SimpleNamespace(begin=lambda served, job: b"", whole=lambda answers: b"{}")

    async def generate(model: object, job: Any, *_: object, **how: object) -> list[Any]:
        began.append(job.name)
        if began == ["first", "late"]:
            raise full
        await anyio.sleep(0.05)
        return []

    monkeypatch.setattr(answering, "_job", prepare)
    monkeypatch.setattr(answering, "generate", generate)
    model = SimpleNamespace(most_parallel=2, context_tokens=64)

    async def main() -> list[int]:
        places = PlacesHere(SimpleNamespace(model=model, answering=None))  # type: ignore[arg-type]
        statuses = list[int]()

        async def one(name: str) -> None:
            place = await places.take(2)
            statuses.append((await place(BatchRequest(name, COMPLETIONS, {"prompt": "x"}))).status)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for name in ("first", "late"):
                    group.start_soon(one, name)
        return statuses

    assert anyio.run(main) == [200, 200]
    assert began == ["first", "late", "late"]
    with pytest.raises(TierReadError):  # with nobody to wait for
        answer(monkeypatch, "generate", full)


@pytest.mark.parametrize("fits_alone", [True, False])
def test_where_a_request_takes_the_room_of_its_own_answers_they_are_made_one_by_one(
    fits_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, full = list[bool](), TierReadError("no room", errno=errno.ENOSPC)

    async def prepare(served: object, request: BatchRequest) -> Any:
        job = SimpleNamespace(check=lambda context_tokens: None, n_answers=4)
        return job, SimpleNamespace(begin=lambda served, job: b"", whole=lambda answers: b"{}")

    async def generate(model: object, job: object, *_: object, one_by_one: bool) -> list[Any]:
        began.append(one_by_one)
        if not (one_by_one and fits_alone):
            raise full
        return []

    monkeypatch.setattr(answering, "_job", prepare)
    monkeypatch.setattr(answering, "generate", generate)

    async def main() -> int:
        model = SimpleNamespace(most_parallel=4, context_tokens=64)
        places = PlacesHere(SimpleNamespace(model=model, answering=None))  # type: ignore[arg-type]
        place = await places.take(1)
        return (await place(REQUEST)).status

    with nullcontext() if fits_alone else pytest.raises(TierReadError):
        assert anyio.run(main) == 200
    assert began == [False, True]
