"""A process with an open model forks: the child is told that the model is not its, opens its own, and ends as it likes.

The parent goes on as if nothing had happened. Each test runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_run import Model, NotSupported
from in_child import in_child
from kit_models import streamed

TOLD = "of which this one"
OK, PATIENCE_S = 7, 60


def tokens_of(model: Model) -> tuple[int, ...]:
    return model.generate("Once upon", max_tokens=6, temperature=0).result().token_ids


def ending_of(child: Callable[[], None]) -> int:
    """Run `child` in a fork, which then ends as Python does; return what it ended with, 0 where it hung."""
    import signal
    import threading

    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            print(f"in the child: {error!r}")
            sys.exit(1)
        sys.exit(OK)
    alarm = threading.Timer(PATIENCE_S, lambda: os.kill(pid, signal.SIGKILL))
    alarm.start()
    _, status = os.waitpid(pid, 0)
    alarm.cancel()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_is_not_forked(grown: Path, kit: Path, threads: int) -> None:
    _a_model_is_not_forked(grown=grown, kit=kit, threads=threads)


@in_child
def _a_model_is_not_forked(grown: Path, kit: Path, threads: int) -> None:
    with Model(grown, **{**streamed(), "threads": threads}) as model:
        assert model.plan.mode == "streamed"
        wanted = tokens_of(model)
        unfinished = model.generate("Once", max_tokens=5, temperature=0)
        next(unfinished)

        def use() -> None:
            uses: list[Callable[[], Any]] = [
                lambda: tokens_of(model),
                lambda: model.tokenize("a"),
                lambda: next(unfinished),
                lambda: model.trained_context_tokens,
            ]
            for one in uses:
                with pytest.raises(NotSupported, match=TOLD) as caught:
                    one()
                assert "\n" not in str(caught.value)
            model.close()

        def leave() -> None:
            """End with all of it unclosed."""

        def open_another() -> None:
            with Model(kit, threads=threads, context_tokens=256) as own:
                assert len(tokens_of(own)) == 6
            with Model(grown, **{**streamed(), "threads": threads}) as own:
                assert tokens_of(own) == wanted

        assert [ending_of(child) for child in (use, leave, open_another)] == [OK] * 3
        assert len(unfinished.result().token_ids) == 5
        assert tokens_of(model) == wanted


def _answer(results: Any, kit: Path, model: Model) -> None:
    try:
        tokens_of(model)
    except NotSupported as error:
        with Model(kit, threads=2, context_tokens=256) as own:
            results.put((str(error), tokens_of(own)))


@in_child
def test_workers_of_multiprocessing_open_their_own(kit: Path) -> None:
    context = multiprocessing.get_context("fork")
    with Model(kit, threads=2, context_tokens=256) as model:
        wanted, results = tokens_of(model), context.Queue()
        workers = [context.Process(target=_answer, args=(results, kit, model)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for _ in workers:
            message, tokens = results.get(timeout=PATIENCE_S)
            assert TOLD in message
            assert tokens == wanted
        for worker in workers:
            worker.join(PATIENCE_S)
            assert worker.exitcode == 0
        assert tokens_of(model) == wanted
