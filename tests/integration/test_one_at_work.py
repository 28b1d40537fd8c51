"""A model serves one thread at a time: another one is refused, and nothing is freed or overwritten under an answer."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from at_once import GREEDY, OPTIONS, PROMPT
from edge_run import (
    Cancelled,
    ConfigError,
    EdgeRunError,
    Embeddings,
    Generation,
    ManyStream,
    Model,
    Piece,
    Request,
    Turn,
)
from edge_run.runtime.generation.batch import Batch
from in_child import in_child
from kit_models import KIT
from program import fresh_environment
from tiny_models import make_model


@pytest.fixture
def model(model_of_two: Model) -> Model:
    return model_of_two


def busy(model: Model) -> tuple[threading.Thread, list[object]]:
    """Return a thread that generates until it is ended, in the middle of it, and what it comes to."""
    found = list[object]()

    def generate() -> None:
        try:
            found.append(model.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True).result())
        except EdgeRunError as error:
            found.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while model.stats.completion_tokens == 0 and model.progress is None and thread.is_alive():
        time.sleep(0.001)
    return thread, found


def beside(model: Model, action: Callable[[], Any]) -> Any:
    """Return what `action` returns while another thread is at work."""
    has_begun, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: model._workplace.do(lambda: (has_begun.set(), may_end.wait(60))))
    thread.start()
    try:
        assert has_begun.wait(60)
        return action()
    finally:
        may_end.set()
        thread.join(60)


def test_another_thread_is_refused_and_told_what_to_do(kit: Path) -> None:
    with Model(kit, **OPTIONS) as model:
        wanted = model.generate(PROMPT, max_tokens=60, temperature=0).result().text
        has_begun, may_end, done = threading.Event(), threading.Event(), list[str]()

        def at_work() -> str:
            has_begun.set()
            assert may_end.wait(60)
            return "done"

        thread = threading.Thread(target=lambda: done.append(model._workplace.do(at_work)))
        thread.start()
        assert has_begun.wait(60)
        for action in (
            lambda: model.generate(PROMPT),
            model.open_batch,
            lambda: model.generate_many([PROMPT]),
            lambda: model.embed(PROMPT),
        ):
            with pytest.raises(ConfigError, match=r"at work in another thread.*AsyncModel"):
                action()
        may_end.set()
        thread.join(60)
        assert done == ["done"]
        assert model.generate(PROMPT, max_tokens=60, temperature=0).result().text == wanted


def test_answers_go_on_after_a_refusal(model: Model) -> None:
    """Many answers were all lost, without a word, and the prompt that had just been taken."""
    prompts = [PROMPT, "One day", "There was", "Once"]
    wanted = [one.text for one in model.generate_many(prompts, **GREEDY).results() if isinstance(one, Generation)]
    stream = model.generate_many(prompts, **GREEDY)
    texts, n_refused = [""] * 4, 0
    for n_asked in range(1000):
        action = partial(next, stream, None)
        try:
            found = beside(model, action) if n_asked % 3 == 0 else action()
        except ConfigError:
            n_refused += 1
            continue
        if found is None:
            break
        assert isinstance(found[1], Piece)
        texts[found[0]] += found[1].text
    assert texts == wanted
    assert n_refused > 4
    assert next(stream, None) is None


def test_prompts_that_ask_the_answers_themselves_are_refused(model: Model) -> None:
    def answer() -> weakref.ref[ManyStream]:
        def prompts() -> Iterator[str]:
            yield PROMPT
            with pytest.raises(ConfigError, match="in the call that this one comes from"):
                next(stream)
            yield "One day"

        stream = model.generate_many(prompts(), **GREEDY)
        assert len(stream.results()) == 2
        return weakref.ref(stream)

    left = answer()
    gc.collect()
    assert left() is None


def test_many_answers_that_were_left_free_their_samplers(model: Model) -> None:
    stream = model.generate_many([PROMPT, "One day"], max_tokens=8, temperature=1.0)
    next(stream)
    answers = [request.answer for request in stream._many.answers._open.values()]
    assert not any(answer._sampler._is_closed for answer in answers)
    del stream
    gc.collect()
    assert len(answers) == 2
    assert all(answer._sampler._is_closed for answer in answers)
    assert model.generate(PROMPT, max_tokens=2).result().finish_reason == "length"


def test_an_answer_whose_model_was_closed_says_so(kit: Path) -> None:
    """It ended as one that is whole."""
    model = Model(kit, **OPTIONS)
    done = model.generate(PROMPT, max_tokens=2)
    for _ in range(3):
        next(done)
    stream = model.generate(PROMPT, **GREEDY)
    next(stream)
    model.close()
    for action in (partial(next, stream), stream.result):
        with pytest.raises(ConfigError, match="closed"):
            action()
    assert next(done, None) is None
    stream.close()
    assert next(stream, None) is None


def test_threads_that_take_no_turns_have_right_texts_or_errors_of_ours(kit: Path) -> None:
    prompts = ["Once", "One day", "There was"]
    with Model(kit, **OPTIONS) as model:
        wanted = {p: model.generate(p, max_tokens=12, temperature=0).result().text for p in prompts}
        strange, texts = list[BaseException](), list[tuple[str, str]]()

        def work(prompt: str) -> None:
            for _ in range(12):
                try:
                    texts.append((prompt, model.generate(prompt, max_tokens=12, temperature=0).result().text))
                except (ConfigError, Cancelled):
                    time.sleep(0.001)
                except BaseException as error:
                    strange.append(error)

        threads = [threading.Thread(target=work, args=(p,)) for p in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not strange
    assert not any(thread.is_alive() for thread in threads)
    assert texts, "some were not refused"
    assert all(text == wanted[prompt] for prompt, text in texts)


def test_closing_ends_what_another_thread_computes(kit: Path) -> None:
    model = Model(kit, **OPTIONS)
    thread, found = busy(model)
    model.close()
    thread.join(60)
    assert not thread.is_alive()
    assert getattr(found[0], "finish_reason", "cancelled") == "cancelled"
    with pytest.raises(ConfigError, match="closed"):
        model.generate(PROMPT)


@in_child
def test_closing_while_other_threads_embed_or_advance(kit: Path, tmp_path: Path) -> None:
    """Each of these ended the process."""
    bert, ended = make_model("bert", tmp_path), list[EdgeRunError]()

    def until_refused(work: Callable[[], object], has_begun: threading.Event) -> None:
        try:
            while True:
                has_begun.set()
                work()
        except EdgeRunError as error:
            ended.append(error)

    for path, options in ((bert, {"embeddings": True, "context_tokens": 64}), (kit, OPTIONS)):
        for _ in range(5):
            model = Model(path, **options)
            batch = None if path == bert else model.open_batch()

            def work(model: Model = model, batch: Batch | None = batch) -> None:
                if batch is None:
                    model.embed([[5, 6, 7]] * 64)
                elif batch.is_idle:
                    batch.submit(model.begin(Request(PROMPT, 50)), Turn())
                else:
                    batch.advance()

            has_begun = threading.Event()
            thread = threading.Thread(target=until_refused, args=(work, has_begun))
            thread.start()
            assert has_begun.wait(60)
            time.sleep(0.05)
            model.close()
            thread.join(60)
            assert not thread.is_alive()
    assert len(ended) == 10


@in_child
def test_two_threads_embed(tmp_path: Path) -> None:
    """It ended the process."""
    with Model(make_model("bert", tmp_path), embeddings=True, context_tokens=64) as model:
        texts = [[5, 6, 7], [8, 9]] * 4
        wanted = model.embed(texts)
        strange, found = list[BaseException](), list[Embeddings]()

        def work() -> None:
            for _ in range(30):
                try:
                    found.append(model.embed(texts))
                except ConfigError:
                    pass
                except BaseException as error:
                    strange.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not strange
        assert found, "some were not refused"
        assert all(np.array_equal(one.vectors, wanted.vectors) for one in found)


def test_a_model_that_is_asked_from_within_refuses_and_goes_on(tmp_path: Path) -> None:
    refusals = list[str]()

    def ask_again(_: object) -> None:
        for action in (lambda: model.embed([[5]]), model.close):
            with pytest.raises(ConfigError) as caught:
                action()
            refusals.append(str(caught.value))

    with Model(make_model("bert", tmp_path), embeddings=True, context_tokens=64) as model:
        told = model.embed([[5, 6, 7]], on_text=ask_again)
        with pytest.raises(ConfigError, match="were given to on_text"):  # not kept besides: there may be many
            told.of(0)
        assert model.embed([[5, 6, 7]]).tokens  # what was refused did not close it
    assert len(refusals) == 2
    assert all("in the call that this one comes from" in one for one in refusals)


PROGRAM = """
import sys, threading, time
from edge_run import Model
model = Model(sys.argv[1], context_tokens=512, threads=1)
has_begun = threading.Event()

def work():
    try:
        while True:
            for piece in model.generate("Once", max_tokens=300, ignore_eos=True):
                has_begun.set()
    except BaseException:
        pass

threading.Thread(target=work, daemon=True).start()
has_begun.wait(60)
time.sleep(0.05)
sys.exit(3)
"""


@pytest.mark.parametrize("_attempt", range(3))
def test_a_program_may_end_while_a_daemon_computes(kit: Path, tmp_path: Path, _attempt: int) -> None:
    """It was ended by a segmentation fault, and not with its own code."""
    command = [sys.executable, "-c", PROGRAM, str(kit)]
    environment = fresh_environment(tmp_path)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Ctrl-C is sent by a timer")
@in_child
def test_ctrl_c_at_any_moment_leaves_a_model_that_answers() -> None:
    with Model(KIT, **OPTIONS) as model:
        wanted = model.generate(PROMPT, max_tokens=6, temperature=0).result().text
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        n_raised = 0
        for number in range(120):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003 + number * 0.0002)
                model.generate(PROMPT, max_tokens=6, temperature=0).result()
                time.sleep(0.05)
            except KeyboardInterrupt:
                n_raised += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert n_raised
        other = list[str]()
        thread = threading.Thread(
            target=lambda: other.append(model.generate(PROMPT, max_tokens=6, temperature=0).result().text)
        )
        thread.start()
        thread.join(60)
        assert other == [wanted], "no lock is left taken"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Ctrl-C is sent by a timer")
@in_child
def test_ctrl_c_at_any_moment_leaves_answers_at_once_that_go_on() -> None:
    with Model(KIT, sequences=2, **OPTIONS) as model:
        asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
        wanted = [one.text for one in model.generate_many([PROMPT, "One day"], **asked).results()]
        n_wanted = len(list(model.generate_many([PROMPT, "One day"], **asked)))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        n_raised = 0
        for number in range(80):
            stream = model.generate_many([PROMPT, "One day"], **asked)
            n_pieces, n_before, is_set = 0, n_raised, False
            while True:
                try:
                    if not is_set:
                        is_set = True
                        signal.setitimer(signal.ITIMER_REAL, 0.0003 + number * 0.0003)
                    for _, piece in stream:
                        assert isinstance(piece, Piece)
                        n_pieces += 1
                    time.sleep(0.05)
                except KeyboardInterrupt:
                    n_raised += 1
                    continue
                break
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert not stream._many.answers.n_running
            assert n_pieces >= n_wanted - (n_raised - n_before), "at most the piece that was just handed over is lost"
        assert n_raised
        again = [one.text for one in model.generate_many([PROMPT, "One day"], **asked).results()]
        assert again == wanted
