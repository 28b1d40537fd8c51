"""Ctrl-C in a program that asks for many answers in shared passes: no token is lost."""

from __future__ import annotations

import signal
from pathlib import Path

from edge_run import Generation, Model, Request, SamplingConfig
from edge_run.base.protocols import Logits
from edge_run.base.results import Piece
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Turn
from in_child import in_child


@in_child
def test_ctrl_c_while_tokens_are_chosen_loses_none(kit: Path) -> None:
    choose, n_chosen, n_stops = Continuation.choose, 0, 0

    def interrupted(self: Continuation, logits: Logits) -> Piece | None:
        nonlocal n_chosen
        n_chosen += 1
        if n_chosen in (5, 9):
            signal.raise_signal(signal.SIGINT)
        return choose(self, logits)

    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        requests = [Request(prompt, 6, SamplingConfig(temperature=0)) for prompt in ("Once", "One day", "Two")]
        wanted = [one.text for one in model.generate_many(requests).results() if isinstance(one, Generation)]
        batch, texts = model.open_batch(), dict[int, str]()
        for request in requests:
            texts[batch.submit(model.begin(request), Turn())] = ""
        Continuation.choose = interrupted  # type: ignore[method-assign]
        while not batch.is_idle:
            try:
                events = batch.advance()
            except KeyboardInterrupt:
                n_stops += 1
                continue
            for event in events:
                texts[event.request] += event.piece.text if event.piece else ""
    assert n_stops == 2
    assert list(texts.values()) == wanted
