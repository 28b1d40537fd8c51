"""Context shift: what follows is what llama.cpp computes after the same shift, and nothing of it is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import Model
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, ConfigError, NotSupported
from edge_run.base.units import MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.speculation_setup import open_session
from exactness import CHUNK_BYTES, fewest_frames, open_at
from in_child import in_child
from kit_models import PROMPT
from tiny_models import N_VOCAB, make_model

OPTIONS: dict[str, Any] = {"micro_batch_tokens": 64, "threads": 1, "check_file": False, "context_shift": True}
TEXT = np.random.default_rng(0).integers(1, N_VOCAB, 8192).tolist()


def say(session: Session, context_tokens: int, n_shifts: int) -> list[np.ndarray]:
    """A prompt that nearly fills the context, tokens beyond it, and then the prompt again."""
    prompt, half = TEXT[: context_tokens - 8], (context_tokens - 1 - 4) // 2  # without BOS
    rows = [session.feed(prompt)[0].copy()]
    rows += [session.step(TEXT[-i]).copy() for i in range(1, (n_shifts - 1) * half + 40)]
    assert session.shifted_tokens == n_shifts * half
    logits, cached = session.feed(prompt)
    assert cached == 0
    assert session.shifted_tokens == 0
    return [*rows, logits.copy(), session.step(5).copy()]


def open_lending(path: Path, settings: dict[str, Any]) -> Engine:
    """Open `path` in about the least memory that has room for the whole context."""
    engine = open_at(path, 0.0, settings)
    while (plan := engine.plan).context_tokens < settings["context_tokens"]:
        lacking_bytes = plan.kv_bytes * settings["context_tokens"] // plan.context_tokens - plan.kv_bytes
        memory = engine.budget_bytes + max(MIB // 4, lacking_bytes // 2)
        engine.close()
        engine = Engine.open(path, ModelConfig(memory=memory, **settings, chunk_bytes=CHUNK_BYTES))
    assert engine.plan.mode == "streamed"
    return engine


@pytest.mark.parametrize(
    ("name", "context_tokens", "n_shifts", "options"),
    [
        ("llama", 256, 2, {"exact": True}),
        ("qwen3moe", 256, 2, {}),
        ("llama", 1024, 1, {"kv_type": "f32", "micro_batch_tokens": 256}),
    ],
)
@in_child
def test_it_is_llama_cpps(
    name: str, context_tokens: int, n_shifts: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model(name, tmp_path)
    settings = {**OPTIONS, "context_tokens": context_tokens, **options}
    engine = open_lending(path, settings)
    found = say(open_session(engine), engine.front.capabilities.context_tokens, n_shifts)
    assert engine._loaded.context.sparse_caches or context_tokens == 256
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    plain = Engine.open(path, ModelConfig(backend="llama.cpp", **settings))
    wanted = say(open_session(plain), plain.front.capabilities.context_tokens, n_shifts)
    assert all(np.isfinite(row).all() for row in wanted)
    assert not [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not np.array_equal(a, b)]
    assert np.array_equal(found[0], found[-2])  # nothing of what was shifted is left
    plain.close()


@in_child
def test_what_keys_are_turned_by_is_there_where_nearly_everything_streams(tmp_path: Path) -> None:
    """Factors of rotary embeddings in the middle of a file: llama.cpp reads them before the pass has asked for them."""
    path, settings = make_model("llama", tmp_path), {**OPTIONS, "context_tokens": 256}
    with fewest_frames(0.0):
        engine = open_at(path, 0.0, settings)
    backing = engine._loaded.backing
    assert backing
    space = backing.address_space
    (factors,) = [space.chunks_of(*place) for place in space.staying]
    assert space.unmovable.issuperset(factors)
    assert engine.plan.streamed_bytes_per_pass > engine.plan.pinned_bytes
    found = say(open_session(engine), 256, 2)
    engine.close()
    plain = Engine.open(path, ModelConfig(backend="llama.cpp", **settings))
    wanted = say(open_session(plain), 256, 2)
    assert not [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not np.array_equal(a, b)]
    plain.close()


def test_a_shift_that_was_stopped_leaves_nothing(llama: Path) -> None:
    engine = open_at(llama, 0.1, {**OPTIONS, "context_tokens": 256})
    session = open_session(engine)
    wanted = session.feed(TEXT[:256][:250])[0].copy()
    for token in range(1, 6):
        session.step(token)
    engine.interrupt.cancel()
    with pytest.raises(Cancelled):
        session.step(7)
    engine.interrupt.reset()
    assert session.history == []
    assert np.array_equal(session.feed(TEXT[:250])[0], wanted)
    engine.close()


@pytest.mark.parametrize("name", ["gemma3", "falcon-h1"])
def test_models_that_cannot_shift_are_refused(name: str, folder: Path) -> None:
    engine = Engine.open(make_model(name, folder), ModelConfig(**OPTIONS, context_tokens=2048))
    with pytest.raises(NotSupported, match="cannot shift"):
        open_session(engine)
    engine.close()


def test_an_answer_goes_on_beyond_a_context_that_shifts(kit: Path) -> None:
    with Model(kit, context_tokens=256, threads=1, context_shift=True, context_keep_tokens=5) as model:
        found = model.generate(PROMPT, max_tokens=300, temperature=0)
        generation = found.result()
    assert (generation.finish_reason, generation.completion_tokens) == ("length", 300)
    assert generation.shifted_tokens == (256 - 1 - 6) // 2, "BOS stays as well"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kv_spill": "on"}, "kv_spill="),
        ({"kv_type": "q8_0/f16"}, "give kv_type='f16'"),
        ({"kv_type": "bf16/f16"}, "give kv_type='f16' or f32"),  # llama.cpp would end the process
        ({"sequences": 2}, "sequences=1"),
        ({"speculate": "ngram"}, "without guesses"),
        ({"gpu_memory": None}, "gpu_memory=0"),
        ({"context_keep_tokens": -2}, "context keep -2"),
    ],
)
def test_what_excludes_it_is_said(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ModelConfig(context_shift=True, **options)
