"""Attention on a part of the context: what llama.cpp computes is what it would with the other rows hidden."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import Model
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.units import KIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.planning.planner import Planner
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.streaming.chosen_rows import ChosenRows
from exactness import open_at
from in_child import in_child
from tiny_models import N_VOCAB, make_model

OPTIONS: dict[str, Any] = {"context_tokens": 512, "micro_batch_tokens": 64, "threads": 1, "check_file": False}
TEXT = np.random.default_rng(0).integers(1, N_VOCAB, 400).tolist()


def say(engine: Engine) -> list[np.ndarray]:
    session = Session(engine.decoder)
    rows = [session.feed(TEXT[:200])[0].copy()]
    rows += [session.step(token).copy() for token in TEXT[200:260]]
    rows.append(session.feed(TEXT[:100] + TEXT[300:380])[0].copy())  # rows are written anew
    return [*rows, *(session.step(token).copy() for token in TEXT[:20])]


def feature(engine: Engine) -> ChosenRows:
    return next(one for one in engine._loaded.driver.features if isinstance(one, ChosenRows))


@pytest.mark.parametrize("name", ["llama", "falcon-h1"])
@in_child
def test_it_is_the_same_streamed_or_not_and_llama_cpps_where_all_is_looked_at(name: str, tmp_path: Path) -> None:
    path = make_model(name, tmp_path)
    found: dict[str, list[np.ndarray]] = {}
    for way, options in {
        "plain": {"backend": "llama.cpp"},
        "all": {"kv_keep": 512},
        "pages": {"kv_keep": 96},
        "blocks": {"kv_keep": 96, "kv_keep_by": "blocks"},
        "window": {"kv_keep": 96, "kv_keep_by": "window"},
    }.items():
        engine = Engine.open(path, ModelConfig(**{**OPTIONS, **options}))
        found[way] = say(engine)
        if "kv_keep" in options:
            share = feature(engine).figures.share
            assert share == 1 if way == "all" else 0.1 < share < 0.6
        engine.close()
    assert all(np.array_equal(a, b) for a, b in zip(found["plain"], found["all"], strict=True))
    for way in ("pages", "blocks", "window"):
        same = [np.array_equal(a, b) for a, b in zip(found["plain"], found[way], strict=True)]
        assert same[0]  # prompts look at everything
        assert sum(same) < 5
    streamed = open_at(path, 0.1, {**OPTIONS, "kv_keep": 96})
    assert all(np.array_equal(a, b) for a, b in zip(found["pages"], say(streamed), strict=True))
    assert streamed.memory_use.peak_bytes <= streamed.budget_bytes
    streamed.close()


@pytest.mark.parametrize("name", ["llama", "deepseek2"])
@in_child
def test_plans_count_the_bounds_of_keys_and_a_cut_text_gives_theirs_back(name: str, tmp_path: Path) -> None:
    path, length = make_model(name, tmp_path), 5120
    options = {**OPTIONS, "context_tokens": length, "micro_batch_tokens": 256, "kv_keep": 96, "chunk_bytes": 64 * KIB}
    engine = Engine.open(path, ModelConfig(**options, memory="1GiB"))
    planned = Planner(prepare(engine.gguf, replace(engine.config, check_file=True))).plan()
    assert (planned.mode, planned.kv_bytes) == (engine.plan.mode, engine.plan.kv_bytes)
    all_bytes = sum(item.size_bytes for item in engine.plan.items)
    engine.close()
    engine = Engine.open(path, ModelConfig(**options, memory=all_bytes - 512 * KIB))  # so that some weights stream
    plan, counted = engine.plan, engine.plan.kv_bytes - engine._loaded.context.kv_bytes
    assert plan.context_tokens == length
    session = Session(engine.decoder)
    session.feed((TEXT * 20)[: length - 100])
    session.step(TEXT[0])
    held = feature(engine).bounds_bytes
    assert 0.9 * counted < held <= counted
    session.feed(TEXT[:100])
    session.step(TEXT[100])
    assert feature(engine).bounds_bytes <= held / 8
    engine.close()


@pytest.mark.parametrize("length", [257, 300])
@in_child
def test_pages_are_those_of_the_text_that_came_back_and_not_of_the_one_before(length: int, tmp_path: Path) -> None:
    path, options = make_model("llama", tmp_path), {**OPTIONS, "kv_keep": 96, "backend": "edge-run"}
    found = []
    for before in (None, TEXT[100:], TEXT[100:]):
        engine = Engine.open(path, ModelConfig(**options, prompt_cache=tmp_path / "kept" if before else "off"))
        session, said = Session(engine.decoder), list[str]()
        if before:
            session.keeper = keeper = open_keeper(engine, said.append)
            assert keeper, said
            session.feed(before)
        first, cached = session.feed(TEXT[:length])
        found.append([first.copy(), *(session.step(token).copy() for token in TEXT[300:340])])
        if before:
            keeper.close()
        engine.close()
    assert cached == 256
    assert all(np.array_equal(a, b) and np.array_equal(a, c) for a, b, c in zip(*found, strict=True))


def test_answers_and_the_key_say_that_it_is_lossy(kit: Path) -> None:
    with Model(kit, context_tokens=512, threads=1, kv_keep=64) as model:
        short = model.generate("Once upon a time", max_tokens=4, temperature=0).result()
        assert short.numerics.kv_keep == "pages 64"
        assert short.kv_keep
        assert short.kv_keep.share == 1
        long = model.generate("Once upon a time there was a fox. " * 20, max_tokens=8, temperature=0).result()
        assert long.kv_keep
        assert long.kv_keep.share < 0.9
    with Model(kit, context_tokens=256, threads=1) as model:
        plain = model.generate("Once upon a time", max_tokens=4, temperature=0).result()
    assert (plain.numerics.kv_keep, plain.kv_keep, plain.token_ids) == ("", None, short.token_ids)


@pytest.mark.parametrize("name", ["gemma3", "mamba", "deepseek32", "glm-dsa"])
def test_models_that_it_is_not_for_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(NotSupported, match=": kv keep "):
        Engine.open(make_model(name, folder), ModelConfig(**OPTIONS, kv_keep=64))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kv_keep": 63}, "64 tokens or more"),
        ({"kv_type": "q8_0"}, "kv_type="),
        ({"kv_type": "f32"}, "kv_type="),  # which llama.cpp makes f16 of for each attention, elsewhere
        ({"exact": True}, "exact="),
        ({"sequences": 2}, "sequences=1"),
        ({"speculate": "ngram"}, "without guesses"),
        ({"backend": "llama.cpp"}, "backend="),
    ],
)
def test_what_excludes_it_is_said(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ModelConfig(**{"kv_keep": 64, **options})
