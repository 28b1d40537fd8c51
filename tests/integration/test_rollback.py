"""Guesses for models with recurrent state, which llama.cpp can cut back by a few tokens: chains, and the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eager import Eager
from edge_run import Cancelled, Model
from edge_run.base.protocols import BatchToken
from edge_run.base.results import Generation
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.planning.speculation_shape import ROLLBACK_TOKENS, ROLLING_BACK
from edge_run.runtime.speculation import shared_drafters
from edge_run.runtime.speculation.drafting import Guess, Guesses, WantedGuesses
from exactness import open_at
from in_child import in_child
from recipes.recipe import WINDOW
from tiny_models import ARCHITECTURES, make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 256, "micro_batch_tokens": 32}
PROMPT = [3, 4, 5, 6] * 5
N_TOKENS = 60
KINDS = ("lfm2", "nemotron_h", "qwen35moe")  # of convolutions, of Mamba 2, of delta rules with experts


class Knowing:
    """A drafter that knows the answer, and guesses one token in five wrong."""

    answer: Sequence[int] = ()

    def draft(self, history: Sequence[int], wanted: WantedGuesses) -> Guesses:
        start = len(history) - len(PROMPT)
        guesses: dict[tuple[int, ...], Guess] = {}
        path: tuple[int, ...] = ()
        for place in range(start, min(start + wanted.most_depth, len(self.answer))):
            path = (*path, self.answer[place] if place % 5 else 1)
            guesses[path] = Guess(0.9 ** len(path), ("knowing", len(path), 0), 0.9)
        return guesses


def test_the_kinds_are_known_to_roll_back() -> None:
    assert ROLLING_BACK.issuperset(KINDS)


def answer(path: Path, **options: Any) -> tuple[Generation, str]:
    with Model(path, **OPTIONS, **options) as model:
        return model.generate(PROMPT, max_tokens=N_TOKENS, temperature=0).result(), model.speculation.reason


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_chains_and_the_text_is_the_same(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(kind, folder)
    wanted, _ = answer(path)
    monkeypatch.setattr(speculation_setup, "WidthControl", Eager)
    monkeypatch.setattr(shared_drafters, "Lookup", Knowing)
    monkeypatch.setattr(Knowing, "answer", wanted.token_ids)
    found, reason = answer(path, speculate="ngram")
    assert found.token_ids == wanted.token_ids
    assert f"a chain of {ROLLBACK_TOKENS} at most" in reason
    assert (found.numerics.rollback_tokens, wanted.numerics.rollback_tokens) == (ROLLBACK_TOKENS, 0)
    assert found.speculation.passes < N_TOKENS * 2 / 3
    assert found.speculation.drafted > found.speculation.accepted > N_TOKENS / 3
    assert max(found.speculation.widths) <= ROLLBACK_TOKENS + 1


@pytest.mark.parametrize(
    "options", [{"exact": True}, {"sequences": 2}, {"prompt_cache": "on"}], ids=lambda o: next(iter(o))
)
def test_where_state_is_not_cut_nothing_is_guessed(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    _, reason = answer(make_model("lfm2", folder), speculate="ngram", cache_folder=tmp_path, **options)
    assert "cannot be cut here" in reason


@in_child
@pytest.mark.parametrize("kind", ["lfm2", "qwen35"])
def test_state_is_cut_back_streamed_as_in_memory(folder: Path, kind: str) -> None:
    path = make_model(kind, folder)
    options = {**OPTIONS, "rollback_tokens": ROLLBACK_TOKENS, "outputs_per_pass": ROLLBACK_TOKENS + 1}

    def rows(engine: Engine) -> np.ndarray:
        found, end = [], 0
        for n_tokens, kept in ((20, 20), (8, 23), (8, 30), (8, 31), (8, 37), (8, 42)):
            tokens = [BatchToken(7 + 5 * i % 97, i, 0, i >= end + n_tokens - 8) for i in range(end, end + n_tokens)]
            found.append(engine.decoder.decode(tokens).copy())
            end = engine.decoder.rewind(0, kept)
            assert end == kept
        assert engine.decoder.capabilities.rollback_tokens == ROLLBACK_TOKENS
        engine.close()
        return np.concatenate(found)

    streamed, whole = (rows(open_at(path, share, options)) for share in (0.05, 1.5))
    assert np.array_equal(streamed, whole)


@in_child
@pytest.mark.parametrize("kind", ["lfm2", "qwen35"])
def test_state_that_the_last_pass_did_not_keep_is_not_gone_back_to(folder: Path, kind: str) -> None:
    """llama.cpp would: to the state before other tokens, which passes of more tokens left."""
    options = {**OPTIONS, "rollback_tokens": ROLLBACK_TOKENS, "outputs_per_pass": ROLLBACK_TOKENS + 1}
    engine = open_at(make_model(kind, folder), 1.5, options)
    decoder, end = engine.decoder, 0

    def decode(n_tokens: int) -> np.ndarray:
        nonlocal end
        tokens = [BatchToken(7 + 5 * i % 97, i, 0, i == end + n_tokens - 1) for i in range(end, end + n_tokens)]
        rows, end = decoder.decode(tokens).copy(), end + n_tokens
        return rows

    for widths, cut, kept in (((20, 1, 1, 1), 19, 0), ((20, 1, 1, 1), 22, 0), ((20, 4), 21, 21), ((20, 4), 20, 0)):
        decoder.clear()
        end = 0
        for width in widths:
            decode(width)
        assert decoder.rewind(0, cut) == kept, (widths, cut)
        if kept:
            assert decoder.rewind(0, cut - 1) == 0, "once"
    decoder.clear()
    end = 0
    decode(20)
    engine.interrupt.cancel()
    with pytest.raises(Cancelled):
        decode(3)
    assert decoder.rewind(0, 20) in (0, 20)
    found, end = decoder.rewind(0, 20), 0
    if found == 0:
        decode(20)
    else:
        end = 20
    after = decode(3)
    decoder.clear()
    end = 0
    decode(20)
    assert np.array_equal(after, decode(3))
    engine.close()


@in_child
def test_what_is_not_cut_stays_where_attention_has_a_window_too(folder: Path) -> None:
    """llama.cpp says of such memory that it begins where it ends."""
    recipe = ARCHITECTURES["lfm2"]
    ARCHITECTURES["lfm2-window"] = replace(recipe, metadata={**recipe.metadata, **WINDOW})
    options = {**OPTIONS, "rollback_tokens": ROLLBACK_TOKENS, "outputs_per_pass": ROLLBACK_TOKENS + 1}
    engine = open_at(make_model("lfm2-window", folder), 1.5, options)
    assert engine.model.sliding_window_tokens
    decoder = engine.decoder

    def decode(start: int, stop: int) -> np.ndarray:
        tokens = [BatchToken(7 + 5 * i % 97, i, 0, i == stop - 1) for i in range(start, stop)]
        return decoder.decode(tokens).copy()

    decode(0, 150)
    assert decoder.rewind(0, 150) == 150
    decode(150, 158)
    assert decoder.rewind(0, 155) == 155
    found = decode(155, 157)
    decoder.clear()
    for start, stop in ((0, 150), (150, 155), (155, 157)):
        wanted = decode(start, stop)
    assert np.allclose(found, wanted, atol=1e-3)
    engine.close()
