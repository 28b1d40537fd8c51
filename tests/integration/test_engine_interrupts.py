"""An engine that is interrupted, cancelled or forked in a pass: what streams afterwards equals llama.cpp's.

Most tests run in a child process: a read of weights that are not resident ends it.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edge_run import Cancelled
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.llama import _ggml as ggml
from in_child import in_child
from small_engines import AFTERWARDS, PROMPT, greedy, open_engine, plain_tokens, streaming_engine
from tiny_models import make_model


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_signal_during_a_pass(name: str, folder: Path) -> None:
    _a_signal_during_a_pass(path=make_model(name, folder))


@in_child
def _a_signal_during_a_pass(path: Path) -> None:
    """Or a signal whose handler is the program's own; at twelve moments. What follows is right, handlers are back."""
    (wanted,) = plain_tokens(path, PROMPT)

    def give_up(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    ends = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: TimeoutError}
    handlers = [signal.getsignal(number) for number in ends]
    raised = list[type[BaseException]]()
    with streaming_engine(path) as engine:
        session = Session(engine.decoder)
        started = time.monotonic()
        greedy(session, PROMPT)
        duration = time.monotonic() - started
        for moment in range(12):
            timer = threading.Timer(duration * moment / 12, os.kill, (os.getpid(), [*ends][moment % 2]))
            try:
                timer.start()
                session.feed([1])
                greedy(session, PROMPT)
                timer.join()
                time.sleep(0.01)
            except tuple(ends.values()) as error:
                raised.append(type(error))
            assert greedy(session, PROMPT, AFTERWARDS) == wanted[:AFTERWARDS]
        assert [signal.getsignal(number) for number in ends] == handlers
    assert raised == [*ends.values()] * 6


@in_child
def test_cancelling_from_another_thread(llama: Path) -> None:
    """At any moment: the pass ends with Cancelled, or was over by then; the tokens that follow are right."""
    (wanted,) = plain_tokens(llama, PROMPT)
    n_cancelled = 0
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        for moment in range(12):
            timer = threading.Timer(0.007 * moment, engine.interrupt.cancel)
            timer.start()
            try:
                session.feed([2, moment])
                session.feed(PROMPT)
            except Cancelled:
                n_cancelled += 1
            timer.join()
            engine.interrupt.reset()  # which it was too late for, perhaps
            assert greedy(session, PROMPT, AFTERWARDS) == wanted[:AFTERWARDS]
    assert n_cancelled > 0


@in_child
def test_a_long_prompt_can_be_cancelled_where_no_callback_is_installed(llama: Path) -> None:
    """A model that fits is computed without one: then between two micro-batches."""
    with open_engine(llama, micro_batch_tokens=1) as engine:
        assert engine.plan.mode == "resident"
        session = Session(engine.decoder)
        session.feed(PROMPT)
        threading.Timer(0.05, engine.interrupt.cancel).start()
        prompts = ([token, *PROMPT * 6] for token in itertools.cycle([1, 2]))
        with pytest.raises(Cancelled):
            list(map(session.feed, prompts))


@in_child
def test_a_pass_that_is_stopped_after_one_that_failed(llama: Path) -> None:
    """The failed one leaves nodes out of the graph, which llama.cpp uses again; the stopped one ends before them."""
    with streaming_engine(llama) as engine:
        decoder, driver, settle = engine.decoder, engine._loaded.driver, ggml.settle

        def decode() -> np.ndarray:
            return decoder.decode([BatchToken(token, i, 0, True) for i, token in enumerate(PROMPT[:16])]).copy()

        wanted = decode()
        for failing in (3, 20, 60):
            decoder.rewind(0, 0)
            asked = itertools.count()

            def fail(*node: Any, asked: Iterator[int] = asked, failing: int = failing) -> bool:
                if next(asked) == failing:
                    raise Cancelled("here")
                return settle(*node)

            with mock.patch.object(ggml, "settle", fail), pytest.raises(Cancelled):
                decode()
            driver.stop.set(True)
            with pytest.raises(Cancelled):
                decode()
            assert np.array_equal(decode(), wanted)


@in_child
def test_a_fork_while_it_streams_harms_nobody(llama: Path) -> None:
    """Frames stay out of the child, which may do what forks are for: nothing of ours, and exit."""
    (wanted,) = plain_tokens(llama, PROMPT)
    with streaming_engine(llama) as engine:
        session = Session(engine.decoder)
        children: list[int] = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                time.sleep(0.05)
                os._exit(0)
            children.append(child)
            assert greedy(session, PROMPT) == wanted
            session.feed([1])
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert greedy(session, PROMPT) == wanted
