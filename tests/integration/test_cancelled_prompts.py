"""Prompts that are cancelled while they are read: what was computed of them is there for the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_run import Model
from edge_run.base.errors import Cancelled, ModelFileError
from edge_run.base.results import Generation
from kit_models import streamed
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 512, "micro_batch_tokens": 32}
PROMPT = [3 + 7 * n % 250 for n in range(200)]
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}


def after_passes(model: Model, n_passes: int, act: Callable[[], object]) -> None:
    """Have something done once, when a pass has ended and so many have."""
    timeline, left = model._engine.decoder._timeline, [n_passes]
    advance = timeline.advance

    def advanced() -> None:
        advance()
        left[0] -= 1
        if not left[0]:
            act()

    timeline.advance = advanced  # type: ignore[method-assign]


def check(model: Model, kept: tuple[int, ...]) -> None:
    wanted = fresh(model)
    model.generate([1, 2], max_tokens=1).result()
    after_passes(model, 3, model.cancel)
    cancelled = model.generate(PROMPT, **GREEDY).result()
    assert (cancelled.finish_reason, cancelled.completion_tokens) == ("cancelled", 0)
    found = model.generate(PROMPT, **GREEDY).result()
    assert found.cached_tokens in kept
    assert found.token_ids == wanted.token_ids


def fresh(model: Model) -> Generation:
    """Return the answer to the prompt as a whole; the first one has the weights read, which counts as a step too."""
    return model.generate(PROMPT, **GREEDY).result()


@pytest.mark.parametrize(
    ("name", "kept"), [("llama", (96,)), ("gemma3", (96,)), ("mamba", (0, 96)), ("falcon-h1", (0, 96))]
)
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"speculate": "ngram"}], ids=["plain", "exact", "guesses"])
def test_whole_passes_stay(name: str, kept: tuple[int, ...], options: dict[str, Any], folder: Path) -> None:
    with Model(make_model(name, folder), **OPTIONS, **options) as model:
        check(model, kept)


def test_whole_passes_stay_over_streamed_weights(grown: Path) -> None:
    with Model(grown, **{**streamed(), **OPTIONS}) as model:
        assert model.plan.mode == "streamed"
        check(model, (96,))


def test_nothing_stays_of_a_pass_in_which_a_file_changed(folder: Path) -> None:
    """Nor does the prompt cache hear of it: it kept rows of weights that were part old, part new."""
    with Model(make_model("llama", folder), **OPTIONS) as model:
        model.generate([1, 2], max_tokens=1).result()
        decoder, n_rows = model._engine.decoder, list[int]()
        confirm, decoder.watcher.ran = decoder._confirm, lambda tokens: n_rows.append(len(tokens))  # type: ignore[method-assign]

        def refuse() -> None:
            raise ModelFileError("the file changed")

        after_passes(model, 3, lambda: setattr(decoder, "_confirm", refuse))
        with pytest.raises(ModelFileError):
            model.generate(PROMPT, **GREEDY).result()
        assert n_rows == [32] * 3
        decoder._confirm = confirm
        assert model.generate(PROMPT, **GREEDY).result().cached_tokens == 0


def test_an_answer_that_is_complete_stays_so_where_it_is_cancelled_as_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What guesses took out of the context is computed again then, where prompts are kept."""
    with Model(make_model("llama", folder), **OPTIONS) as model:
        wanted = fresh(model)

        def finish() -> None:
            model.cancel()
            model._engine.interrupt.check()

        monkeypatch.setattr(model._session, "finish", finish)
        found = model.generate(PROMPT, **GREEDY).result()
        assert (found.finish_reason, found.token_ids) == ("length", wanted.token_ids)
        monkeypatch.undo()
        assert model.generate(PROMPT, **GREEDY).result().token_ids == wanted.token_ids


def test_a_decoder_that_is_used_directly_takes_all_back(folder: Path) -> None:
    from edge_run.base.protocols import BatchToken

    with Model(make_model("llama", folder), **OPTIONS) as model:
        decoder = model._engine.decoder
        decoder.keeps_whole_passes = False
        after_passes(model, 3, model.cancel)
        with pytest.raises(Cancelled):
            decoder.decode([BatchToken(token, i, 0, i == 199) for i, token in enumerate(PROMPT)])
        assert decoder.rewind(0, 200) == 0
