"""Runs that are interrupted while they go on without a device, or compute all again: nothing else ends, or differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, DeviceLost
from edge_run.base.fields import Document
from edge_run.base.mesh import MeshOptions, Message
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.mesh_pipeline import plan_pipeline
from edge_run.partition.mesh_ring import Hop
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Meter
from edge_run.runtime.generation.request import Turn
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.mesh.transport import GRAPH_CHANGED
from edge_run.runtime.worker.worker import Worker
from fake_mesh import Hub
from in_child import in_child
from mesh_runs import OPTIONS, PROMPT, Run, alone, answers, greedy, running
from tiny_models import make_model

EXACT = {**OPTIONS, "exact": True}
MOMENTS = ["the lease", "a plan", "slices to open", "what was said", "the second time"]


def press_ctrl_c(run: Run, moment: str) -> None:
    """Have Ctrl-C pressed once, when the run gets that far again."""
    lead, order, epochs = run.mesh.lead, run.mesh.order, set[object]()

    def press() -> None:
        run.mesh.lead, run.mesh.order = lead, order  # type: ignore[method-assign]
        run.hub.on_send = lambda *a: None
        raise KeyboardInterrupt

    def led(*, timeout_s: float, **_: object) -> int:
        return press() or 0 if moment == "the lease" else lead(timeout_s=timeout_s)

    def ordered(node: str, what: Document, *, timeout_s: float) -> Document:
        kinds = {"measure": "a plan", "assign": "slices to open"}
        return press() or {} if kinds.get(str(what["order"])) == moment else order(node, what, timeout_s=timeout_s)

    def sent(source: str, target: str, header: Document) -> None:
        if source == "a" and header.get("what") == "decode" and header["epoch"] > first:  # type: ignore[operator]
            epochs.add(header["number"])
            if (moment, len(epochs)) in (("what was said", 1), ("the second time", 2)):
                press()

    first = run.engine.front._run._failover.epoch  # type: ignore[attr-defined]
    run.mesh.lead, run.mesh.order, run.hub.on_send = led, ordered, sent  # type: ignore[method-assign]


def advance(batch: BatchedAnswers, n_passes: int) -> None:
    for _ in range(n_passes):
        batch.advance()


def say(session: Session, wanted: list[int], at: Callable[[int], None] = lambda i: None) -> list[int]:
    """Return as many tokens of a greedy answer as there are in `wanted`."""
    logits, _ = session.feed(PROMPT)
    said: list[int] = []
    for i in range(len(wanted)):
        at(i)
        said.append(int(logits.argmax()))
        logits = session.step(said[-1])
    return said


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["llama", "granitehybrid"])
@in_child
def test_ctrl_c_while_a_device_is_done_without_ends_the_answer_only(name: str, moment: str, folder: Path) -> None:
    path = make_model(name, folder)
    wanted = alone(path)

    def strike(i: int) -> None:
        if i == 5:
            press_ctrl_c(run, moment)
            run.hub.kill("b")

    with running(path, "bcd") as run:
        with pytest.raises(KeyboardInterrupt):
            greedy(run.engine, at=strike)
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert "b" not in {node.node for node in use.nodes}


@in_child
def test_a_conversation_goes_on_after_ctrl_c(folder: Path) -> None:
    path = make_model("llama", folder)
    engine = Engine.open(path, ModelConfig(memory="4GiB", **EXACT))  # type: ignore[arg-type]
    wanted = greedy(engine)
    engine.close()
    for moment in MOMENTS:
        with running(path, "bcd", EXACT) as run:
            session = Session(run.engine.front)
            logits, _ = session.feed(PROMPT)
            said: list[int] = []
            while len(said) < len(wanted):
                said.append(int(logits.argmax()))
                if len(said) == 5:
                    press_ctrl_c(run, moment)
                    run.hub.kill("b")
                    with pytest.raises(KeyboardInterrupt):
                        session.step(said[-1])
                    logits, _ = session.feed([*PROMPT, *said])
                else:
                    logits = session.step(said[-1])
            assert said == wanted, moment


@pytest.mark.parametrize("name", ["llama", "granitehybrid"])
@pytest.mark.parametrize("moment", [1, 4])
@in_child
def test_ctrl_c_before_a_batch_was_told_takes_back_no_other(moment: int, name: str, folder: Path) -> None:
    """Devices took back the batch before it; where that was the whole prompt, they went on without it."""
    path = make_model(name, folder)
    wanted = alone(path)
    with running(path) as run:
        receive = run.mesh.receive

        def press(*, timeout_s: float, is_bulk: bool = False) -> Message | None:
            if timeout_s or is_bulk:
                return receive(timeout_s=timeout_s, is_bulk=is_bulk)
            run.mesh.receive = receive  # type: ignore[method-assign]
            raise KeyboardInterrupt

        session = Session(run.engine.front)
        logits, _ = session.feed(PROMPT)
        said: list[int] = []
        while len(said) < len(wanted):
            said.append(int(logits.argmax()))
            if len(said) == moment:
                run.mesh.receive = press  # type: ignore[method-assign]
                with pytest.raises(KeyboardInterrupt):
                    session.step(said[-1])
                logits, _ = session.feed([*PROMPT, *said])
            else:
                logits = session.step(said[-1])
        assert said == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert use.recoveries == 0


@pytest.mark.parametrize("groups", [False, True])
@in_child
def test_answers_in_shared_passes_go_on_after_ctrl_c(groups: bool, folder: Path) -> None:
    path, prompts = make_model("llama", folder), [PROMPT[: 5 + 9 * i] for i in range(6)]
    if groups:
        coordinator.plan_pipeline = lambda works, specs, hops, n: plan_pipeline(works, specs, lambda a, b: Hop(0.0), n)
    options = {**OPTIONS, "context_tokens": 1024, "sequences": 4, "exact": not groups}
    wanted: list[list[int]] = []
    for moment in MOMENTS:
        with running(path, "bcd", options) as run:
            wanted = wanted or answers(run.engine, prompts)
            batch = BatchedAnswers(run.engine, Meter(run.engine), 4)
            batch._widths.observe = lambda *_: None  # type: ignore[method-assign]
            found = []
            for prompt in prompts:
                room = run.engine.context_tokens
                found.append(Continuation(run.engine.model, prompt, 12, SamplingConfig(temperature=0), room))
                batch.submit(found[-1], Turn())
            advance(batch, 6)
            press_ctrl_c(run, moment)
            run.hub.kill("b")
            with pytest.raises(KeyboardInterrupt):
                advance(batch, 6)
            while not batch.is_idle:
                assert all(event.error is None for event in batch.advance())
            batch.close()
            assert [answer.tokens for answer in found] == wanted, moment
            assert answers(run.engine, prompts) == wanted, moment


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceLost("it does not take messages in time", node="c")])
@in_child
def test_a_cut_that_one_device_has_missed(error: BaseException, folder: Path) -> None:
    """It would compute something else: all is computed again, without it where it is lost."""
    path = make_model("llama", folder)
    wanted, missed = alone(path), list[str]()

    def miss(source: str, target: str, header: Document) -> None:
        if target == "c" and header.get("what") == "rewind":
            run.hub.on_send = lambda *a: None
            missed.append(target)
            raise error

    with running(path) as run:
        session = Session(run.engine.front)
        assert say(session, wanted) == wanted
        run.hub.on_send = miss
        with contextlib.suppress(KeyboardInterrupt):
            session.feed(PROMPT[:9])
        assert missed == ["c"]
        assert say(session, wanted) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert use.recoveries == isinstance(error, DeviceLost)
        assert len(use.nodes) == 3 - use.recoveries


@pytest.mark.parametrize("name", ["llama", "granitehybrid"])
@in_child
def test_who_stops_what_is_computed_again_for_a_new_graph_loses_no_device(name: str, folder: Path) -> None:
    """Devices that were done with a batch would keep it, and refuse the next one there."""
    path = make_model(name, folder)
    wanted = alone(path)
    with running(path) as run:
        learns: list[Any] = []

        def meet(source: str, target: str, header: Document, parts: list[bytes]) -> tuple[Document, list[bytes]]:
            if header.get("what") == "learn":
                learns.append(header["number"])
            if (source, target, header["kind"]) != ("b", "a", "activation"):
                return header, parts
            if not learns:
                return {**header, "kind": "failed", "code": GRAPH_CHANGED, "error": "another graph"}, []
            if header["number"] == learns[0] + 2:  # type: ignore[operator]
                run.engine.interrupt.cancel()
            return header, parts

        def begin(i: int) -> None:
            if i == 5:
                run.hub.alter = meet

        session = Session(run.engine.front)
        with pytest.raises(Cancelled):
            say(session, wanted, begin)
        assert learns, "all was computed again"
        run.hub.alter = lambda source, target, header, parts: (header, parts)
        run.engine.interrupt.reset()
        session.feed([*PROMPT, *wanted[:3]])  # from where it was stopped
        assert say(session, wanted) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out
        assert {node.node for node in use.nodes} == {"a", "b", "c"}


@pytest.mark.parametrize("wait", ["lead", "measure"])
@in_child
def test_ctrl_c_ends_the_waits_of_opening(wait: str, folder: Path) -> None:
    path, hub = make_model("llama", folder), Hub()
    here, config = hub.join("a"), ModelConfig(memory="4GiB", threads=1, check_file=False)
    options = MeshOptions(say=lambda line: None)

    def press(*_: object, check: Callable[[], None], **__: object) -> None:
        options.interrupt.cancel()
        check()
        raise AssertionError("it waits on")

    setattr(here, wait, press)
    worker = Worker(hub.join("b"), [path], config)
    worker.start()
    try:
        with pytest.raises(Cancelled):
            open_mesh_engine(path, ModelConfig(memory="4GiB", **OPTIONS), here, options)
    finally:
        worker.close()
