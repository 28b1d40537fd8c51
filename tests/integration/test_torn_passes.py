"""Passes of several texts that fail, of models with recurrent state: what other texts held is right, or gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import Generation, Model
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled
from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.request import Turn, make_request
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 256, "micro_batch_tokens": 32, "sequences": 3}
N_TOKENS = 12


def cancel_next(driver: Any) -> None:
    """Have the next pass cancelled once llama.cpp has cells for it."""
    before = driver.before_pass

    def cancel(shape: object) -> None:
        driver.before_pass = before
        before(shape)
        driver.interrupt.cancel()

    driver.before_pass = cancel


def read_all(decoder: LocalDecoder) -> None:
    decoder.clear()
    for sequence in range(3):
        decoder.decode([BatchToken(3 + 7 * i + sequence, i, sequence, i == 11) for i in range(N_TOKENS)])


def next_rows(decoder: LocalDecoder, sequences: Sequence[int]) -> np.ndarray:
    rows = [decoder.decode([BatchToken(5, N_TOKENS, sequence, True)]).copy() for sequence in sequences]
    return np.concatenate(rows)


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_a_text_between_those_of_a_cancelled_pass_keeps_its_own_state_or_none(name: str, folder: Path) -> None:
    """llama.cpp had noted that its state lies where that of another one lay, and not moved it there yet."""
    engine = Engine.open(make_model(name, folder), ModelConfig(**OPTIONS, backend="edge-run"))
    decoder = engine.decoder
    read_all(decoder)
    wanted = next_rows(decoder, range(3))
    read_all(decoder)
    assert decoder.rewind(0, 0) == 0
    beside = next_rows(decoder, (1, 2))
    for cancelled, kept in (((0, 2), []), ((0,), [1, 2])):
        read_all(decoder)
        cancel_next(decoder._driver)
        with pytest.raises(Cancelled):
            decoder.decode([BatchToken(9, N_TOKENS, sequence, True) for sequence in cancelled])
        assert [sequence for sequence in range(3) if decoder.rewind(sequence, N_TOKENS)] == kept
        if kept:
            assert np.array_equal(next_rows(decoder, kept), beside)
        read_all(decoder)
        assert np.array_equal(next_rows(decoder, range(3)), wanted)
    engine.close()


def finish(batch: Batch, *numbers: int) -> list[Generation]:
    """Compute until these requests have ended; return their answers."""
    found = dict[int, Generation]()
    while not found.keys() >= set(numbers):
        for event in batch.advance():
            if event.is_last and event.piece and event.piece.generation:
                found[event.request] = event.piece.generation
    return [found[number] for number in numbers]


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_a_conversation_that_waits_for_its_next_turn_goes_on_with_its_own_text(name: str, folder: Path) -> None:
    prompts = [[3 + 7 * i % 90 + one for i in range(N_TOKENS + one)] for one in range(3)]
    with Model(make_model(name, folder), **OPTIONS, backend="edge-run") as model:
        batch = model.open_batch()

        def submit(prompt: Sequence[int], n_tokens: int) -> int:
            request = make_request(prompt, max_tokens=n_tokens, temperature=0)
            return batch.submit(model.begin(request), Turn())

        numbers = [submit(prompt, n_tokens) for prompt, n_tokens in zip(prompts, (60, 4, 60), strict=True)]
        (first_turn,) = finish(batch, numbers[1])
        cancel_next(model._engine.decoder._driver)
        others = finish(batch, numbers[0], numbers[2])
        assert [one.finish_reason for one in others] == ["cancelled"] * 2
        text = [*prompts[1], *first_turn.token_ids, 9, 8, 7]
        (found,) = finish(batch, submit(text, 12))
        (alone,) = model.generate_many([text], max_tokens=12, temperature=0).results()
        assert isinstance(alone, Generation)
        assert (alone.cached_tokens, found.token_ids) == (0, alone.token_ids)
