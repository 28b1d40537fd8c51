"""The merge gate for lent memory: logits are llama.cpp's while room changes hands before every pass.

Models stream with little memory and a context that is a large part of it. Texts grow by prompts and by single tokens,
are cut and cleared; guesses are verified, in a row and in trees. What nobody has lent is unreadable, so a read of
weights that are not there ends the child process that a test runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edge_run.base.errors import Cancelled, ContextFull
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama import context_shape, logit_rows
from exactness import open_at
from in_child import in_child
from slices import least_lent
from talks import OPTIONS, SEQUENCES, WIDTH, Talk, check_rows, say, say_in_branches
from tiny_models import N_VOCAB, make_model
from witness import Witness


def open_lending(path: Path, share: float, settings: dict[str, Any], by_expert: bool) -> tuple[Engine, Witness]:
    """Open `path` under the smallest budget that works plus `share` of it; a good part of that changes hands."""
    engine = open_at(path, share, settings, by_expert, chunk_bytes=32 * KIB)
    plan = engine.plan
    assert plan.lent_bytes > 0.1 * (plan.pinned_bytes + plan.window_bytes + plan.expert_bytes)
    assert plan.streamed_bytes_per_batch > 0 or plan.expert_bytes > 0
    assert (plan.expert_bytes > 0) == by_expert
    return engine, Witness(engine)


def compare(
    path: Path, script: Callable[[Talk], None], share: float = 0.3, *, by_expert: bool = False, **options: Any
) -> None:
    """Assert that a streamed run of `script` is llama.cpp's, in its budget, and that loans come and go."""
    settings = {**OPTIONS, **options}
    engine, witness = open_lending(path, share, settings, by_expert)
    found = Talk(engine.decoder, witness.look)
    script(found)
    loans, lent_bytes = witness.lender.loans, engine.plan.lent_bytes
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    assert max(witness.counts) > 0.5 * lent_bytes / loans.loan_bytes
    assert loans.times_granted > 2
    assert (np.diff(witness.counts) < 0).sum() > 2, witness.counts
    engine.close()
    check_rows(path, script, settings, found)


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon-h1", "minicpm3"])
@in_child
def test_models_that_stream_in_order(name: str, folder: Path) -> None:
    """A plain one; one with a cache for a sliding window; with states beside keys and values; with latent attention."""
    compare(make_model(name, folder), say)


@pytest.mark.parametrize(("name", "scale", "share"), [("qwen3moe", 1, 0.3), ("deepseek2", 4, 0.05), ("jamba", 4, 0.3)])
@in_child
def test_models_that_stream_by_expert(name: str, scale: int, share: float, folder: Path) -> None:
    """A plain one; one with latent attention, whose other weights stream too; with states."""
    compare(make_model(name, folder, scale=scale), say, share, by_expert=True, context_tokens=32_768)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_type": "q8_0"}),
        ("qwen3", {"kv_type": "q8_0/q4_0"}),
        ("llama", {"flash_attention": "off"}),
        ("llama", {"exact": True, "flash_attention": "off"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
@in_child
def test_other_caches(name: str, options: dict[str, Any], folder: Path) -> None:
    """Quantised ones, and values that lie in columns, so that a token touches a page of each row."""
    compare(make_model(name, folder), say, context_tokens=16_384, **options)


@pytest.mark.parametrize(
    ("name", "flash_attention", "by_expert"),
    [("llama", "auto", False), ("llama", "off", False), ("qwen3moe", "auto", True)],
)
@in_child
def test_trees_of_guesses(name: str, flash_attention: str, by_expert: bool, folder: Path) -> None:
    """And sequences with texts of their own."""
    path, options = make_model(name, folder), {"flash_attention": flash_attention, "sequences": SEQUENCES}
    with patch.object(context_shape, "RIDING_TOKENS", WIDTH // 2):  # so that a prompt alone takes room back
        compare(path, say_in_branches, by_expert=by_expert, context_tokens=16_384, **options)


@in_child
def test_buffers_that_are_idle_are_lent_too(llama: Path) -> None:
    with least_lent():
        compare(llama, say, 0.5)


@in_child
def test_a_stop_while_weights_give_back(folder: Path) -> None:
    """The pass is not made and the text is as it was; the next one takes what it needs."""
    path = make_model("llama", folder)
    engine, witness = open_lending(path, 0.3, OPTIONS, by_expert=False)
    talk = Talk(engine.decoder, witness.look)
    talk.prompt(100)
    talk.step(1)
    unpin, before = engine._supplied.streams[0].weights.unpin, witness.counts[-1]

    def stop(chunks: object) -> None:
        engine._supplied.streams[0].weights.unpin = unpin
        raise Cancelled("stopped")

    engine._supplied.streams[0].weights.unpin = stop
    with pytest.raises(Cancelled):
        talk.prompt(200)
    assert talk.decoder._lengths() == [talk.position]
    assert witness.lender.loans.n_loans >= witness.counts[-1]
    talk.prompt(200)
    talk.step(1)
    assert witness.counts[-1] < before
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    n_first = talk.position - 201
    engine.close()

    def again(wanted: Talk) -> None:
        wanted.prompt(100)
        wanted.step(1)
        if n_first > 101:
            wanted.prompt(n_first - 101)
        wanted.prompt(200)
        wanted.step(1)

    check_rows(path, again, OPTIONS, talk)


@pytest.mark.parametrize(("name", "by_expert"), [("llama", False), ("qwen3moe", True), ("falcon-h1", False)])
@in_child
def test_a_context_that_does_not_fit_opens_shorter(name: str, by_expert: bool, folder: Path) -> None:
    path = make_model(name, folder)
    engine, witness = open_lending(path, 0.1, OPTIONS, by_expert)
    promised = engine.plan.context_tokens
    assert 512 <= promised < engine.plan.wanted_context_tokens == OPTIONS["context_tokens"]
    assert engine.decoder.capabilities.context_tokens == promised

    def fill(talk: Talk) -> None:
        """To the last token but nine, which come one by one; then all begins again, from the middle if it can."""
        talk.prompt(promised - 9)
        talk.step(9)
        talk.rewind(promised // 2)
        talk.step(2)
        talk.prompt(promised - talk.position)

    talk = Talk(engine.decoder, witness.look)
    fill(talk)
    assert min(witness.counts) <= 1, "a full context leaves nothing"
    with pytest.raises(ContextFull, match="raise memory=") as refusal:
        talk.step()
    assert refusal.value.context_tokens == promised
    talk.rewind(100)
    talk.step(3)
    assert witness.counts[-1] > witness.counts[0] // 2
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()

    def fill_and_go_on(wanted: Talk) -> None:
        fill(wanted)
        wanted.rewind(100)
        wanted.step(3)

    check_rows(path, fill_and_go_on, OPTIONS, talk)


@in_child
def test_a_part_of_a_prompt_rides_along_beside_what_is_lent(folder: Path) -> None:
    options = {**OPTIONS, "sequences": SEQUENCES, "micro_batch_tokens": 256}
    engine, witness = open_lending(make_model("llama", folder, scale=2), 0.3, options, by_expert=False)
    idle_bytes, ends = witness.lender._buffer.size_bytes, [0] * SEQUENCES

    def needed(*parts: tuple[int, int]) -> int:
        """What a pass needs that has so many tokens of these sequences, beside the cells."""
        batch = list[BatchToken]()
        for sequence, n_tokens in parts:
            places = range(ends[sequence], ends[sequence] + n_tokens)
            batch += [BatchToken(5 + place % 9, place, sequence, place == places[-1]) for place in places]
            ends[sequence] += n_tokens
        engine.decoder.decode(batch)
        cells = witness.lender._cells
        assert cells
        return witness.lender.loans.needed_bytes - sum(
            stream.bytes_for(n)
            for stream, n in zip(cells._streams, witness.lender.count.tops, strict=True)  # type: ignore[union-attr]
        )

    assert needed((0, 1), (1, 1), (2, 1)) < idle_bytes
    for _ in range(4):  # where it touched more than it may, nothing would be lent any more after a few passes
        assert needed((0, 1), (1, 1), (2, 1), (3, context_shape.RIDING_TOKENS)) < idle_bytes
    assert not witness.lender._buffer.is_over
    assert needed((0, 1), (3, context_shape.RIDING_TOKENS + 64)) >= idle_bytes
    engine.close()


@in_child
def test_rows_of_logits_are_lent_but_for_those_of_a_pass(folder: Path) -> None:
    path, options = make_model("llama", folder), {**OPTIONS, "outputs_per_pass": WIDTH}
    n_loans = list[int]()

    def guess(talk: Talk) -> None:
        talk.prompt(130)
        for n_guesses in (0, 48, 0, 20, 48):
            talk.verify(1 + n_guesses, 2)
            talk.step()
            n_loans.append(witness.counts[-2])

    with patch.object(logit_rows, "_LEAST_MAPPED_BYTES", 1):
        engine, witness = open_lending(path, 0.3, options, by_expert=False)
        found = Talk(engine.decoder, witness.look)
        guess(found)
        assert engine.memory_use.peak_bytes <= engine.budget_bytes
        engine.close()
    alone, many, again, some, more = n_loans
    row_bytes, loan_bytes = 2 * 4 * N_VOCAB, witness.lender.loans.loan_bytes
    assert alone - many >= 48 * row_bytes // loan_bytes > 1
    assert alone - 1 <= again >= some >= more <= many
    check_rows(path, guess, options, found)
