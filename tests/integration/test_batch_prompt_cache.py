"""The prompt cache where answers share passes: what a context without other texts had comes back into such a one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_run import Generation, Model
from edge_run.runtime.generation.request import Turn, make_request
from kept_prompts import TOKENS
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"threads": 1, "context_tokens": 4096, "micro_batch_tokens": 64, "sequences": 4}
GREEDY: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "top_logprobs": 5}
PROMPT, OTHER = TOKENS[:350], [*TOKENS[:330], *TOKENS[700:750]]


def answers(model: Model, *prompts: Sequence[int]) -> list[Generation]:
    found = model.generate_many(prompts, **GREEDY).results()
    return [one for one in found if isinstance(one, Generation)]


def said(found: Sequence[Generation]) -> list[Any]:
    """What was chosen, and from which logits, to the bit."""
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize(
    ("name", "options", "cached"),
    [
        ("llama", {}, 256),
        ("llama", {"exact": True}, 256),
        ("gemma3", {}, 320),
        ("gemma3", {"exact": True}, 320),
        ("mamba", {}, 320),
        ("falcon-h1", {}, 320),
    ],
)
def test_a_prompt_comes_back_after_the_start(
    name: str, options: dict[str, Any], cached: int, folder: Path, tmp_path: Path
) -> None:
    path, options = make_model(name, folder), {**OPTIONS, **options}
    with Model(path, **options) as model:
        wanted = answers(model, PROMPT)
        wanted_both = answers(model, PROMPT, OTHER)
    for n_cached in (0, cached):
        with Model(path, **options, prompt_cache=tmp_path) as model:
            found = answers(model, PROMPT)
            assert [one.cached_tokens for one in found] == [n_cached]
            assert said(found) == said(wanted)
            assert not model.notices
    with Model(path, **options, prompt_cache=tmp_path) as model:
        both = answers(model, PROMPT, OTHER)
        assert both[0].cached_tokens == cached
        if options.get("exact"):
            assert said(both) == said(wanted_both)
        assert model.generate_many([OTHER], **GREEDY).results()


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-h1"])
def test_what_shared_passes_leave_is_not_in_what_is_kept_later(name: str, folder: Path, tmp_path: Path) -> None:
    path = make_model(name, folder)
    crowd = [TOKENS[60 * i : 60 * i + 70 * (i % 5 + 1)] for i in range(9)]
    with Model(path, **OPTIONS) as model:
        wanted = model.generate(PROMPT, **GREEDY).result()
    for first in (crowd, []):
        with Model(path, **OPTIONS, prompt_cache=tmp_path) as model:
            answers(model, *first)
            found = model.generate(PROMPT, **GREEDY).result()
            assert said([found]) == said([wanted])
    assert found.cached_tokens


def test_a_prompt_cache_serves_requests_of_all_salts(folder: Path, tmp_path: Path) -> None:
    path, n_cached = make_model("llama", folder), list[int]()
    for salt in ("a", "b"):
        with Model(path, **OPTIONS, prompt_cache=tmp_path) as model:
            request = make_request(PROMPT, turn=Turn(salt=salt), **GREEDY)
            (found,) = model.generate_many([request]).results()
            assert isinstance(found, Generation)
            n_cached.append(found.cached_tokens)
    assert n_cached == [0, 256]


def test_it_can_be_cancelled_while_rows_are_read(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder)
    with Model(path, **OPTIONS, prompt_cache=tmp_path) as model:
        wanted = answers(model, PROMPT)
    with Model(path, **OPTIONS, prompt_cache=tmp_path) as model:
        assert model._keeper
        restorer, batch = model._keeper._restorer, model.open_batch()
        check = restorer._check

        def stop() -> None:
            model.cancel()
            check()

        found = []
        for restorer._check in (stop, check):
            batch.submit(model.begin(make_request(PROMPT, **GREEDY)), Turn())
            while not batch.is_idle:
                found += [event.piece.generation for event in batch.advance() if event.is_last and event.piece]
    stopped, again = found
    assert stopped
    assert again
    assert (stopped.finish_reason, stopped.completion_tokens) == ("cancelled", 0)
    assert again.cached_tokens == 256
    assert said([again]) == said(wanted)


@pytest.mark.parametrize("name", ["mamba", "falcon-h1"])
def test_what_a_sequence_computes_after_others_is_not_kept_for_a_new_context(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """llama.cpp has the state of its text where that of the second sequence was; restored, it would be the first's."""
    path, options = make_model(name, folder), {**OPTIONS, "context_tokens": 256, "sequences": 2}
    late = [*TOKENS[500:640]]
    with Model(path, **options) as model:
        (wanted,) = answers(model, late)
    with Model(path, **options, prompt_cache=tmp_path) as model:
        batch, ended = model.open_batch(), dict[int, Any]()

        def submit(prompt: Sequence[int], n_tokens: int) -> int:
            request = make_request(prompt, **{**GREEDY, "max_tokens": n_tokens})
            return batch.submit(model.begin(request), Turn())

        def finish(number: int) -> Any:
            while number not in ended:
                ended.update((event.request, event.piece) for event in batch.advance() if event.is_last)
            return ended[number].generation

        numbers = [submit(TOKENS[:130], 3), submit(TOKENS[200:260], 150)]  # the second makes the first's rest go
        for number in numbers:
            finish(number)
        assert said([finish(submit(late, 9))]) == said([wanted])
    with Model(path, **options, prompt_cache=tmp_path) as model:
        (found,) = answers(model, late)
        assert said([found]) == said([wanted])
