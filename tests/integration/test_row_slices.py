"""The merge gate for products in slices: logits are llama.cpp's while no large matrix is ever in memory as a whole.

Chunks are of a few pages, so that most matrices of small models are large. What is released is unreadable at once
when there are as few frames as can be, so a slice that reads other rows than its own ends the child process.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from default_kernels import needs_default_kernels
from edge_run.base.errors import Cancelled, TierReadError
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.llama.row_products import RowProducts
from edge_run.runtime.planning import experts
from edge_run.tiers._libc import PAGE
from exactness import fewest_frames, open_at
from in_child import in_child
from sabotage import sabotage
from talks import OPTIONS, SEQUENCES, Talk, check_rows, say_in_branches
from tiny_models import make_model


def say(talk: Talk) -> None:
    """A text of passes of all widths: chunks of a page are many, so it is short."""
    talk.prompt(70)
    talk.step(2)
    talk.verify(5, 2)
    talk.rewind(30)
    talk.step(2)
    talk.clear()
    talk.prompt(9)
    talk.step(1)


@pytest.mark.parametrize(
    ("name", "quantisation", "options"),
    [
        ("llama", None, {}),
        ("llama", "Q4_0", {}),
        ("llama", "Q8_0", {"exact": True, "flash_attention": "off"}),
        ("llama", "Q4_K_M", {"threads": 2}),
        pytest.param("llama", "Q4_0", {"repack": "on"}, marks=needs_default_kernels),
        pytest.param("phi3", "Q4_K_M", {"repack": "on", "threads": 2}, marks=needs_default_kernels),
        pytest.param("gemma3", "Q4_0", {"repack": "on"}, marks=needs_default_kernels),
        pytest.param("gemma3", "IQ4_NL", {"repack": "on"}, marks=needs_default_kernels),
        ("gemma3", "Q6_K", {}),
        ("falcon-h1", None, {}),
        ("minicpm3", None, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@in_child
def test_rows_by_slice(name: str, quantisation: str | None, options: dict[str, object], folder: Path) -> None:
    """A plain model in several types; one whose table is its output too; states; latent attention."""
    path, settings = make_model(name, folder, quantisation=quantisation), {**OPTIONS, **options}
    slices, found = count_slices(), list[Talk]()
    for share in (0, 0.2):
        slices.clear()
        with fewest_frames(share):
            engine = open_at(path, share, settings, chunk_bytes=2 * PAGE if quantisation else 4 * PAGE)
        found.append(Talk(engine.decoder))
        say(found[-1])
        # Under a larger budget, what stays is multiplied by as one, and of a small model that may be all.
        assert sum(rows.start > 0 for rows in slices) > 50 or share > 0
        assert bool(slices) is (engine.plan.window_bytes > 0)
        assert all(rows.start % 64 == 0 for rows in slices)
        engine.close()
    check_rows(path, say, settings, found[0])
    assert all(np.array_equal(*rows) for rows in zip(found[0].rows, found[1].rows, strict=True))


@in_child
def test_matrices_beside_experts(folder: Path) -> None:
    """What every token reads streams in order, and in slices, while experts stream as they are chosen."""
    experts.SEGMENT_BYTES = 0
    path, settings = make_model("deepseek2", folder, scale=4), {**OPTIONS, "context_tokens": 1024}
    slices = count_slices()
    engine = open_at(path, 0, settings, by_expert=True, chunk_bytes=2 * PAGE, in_order_too=True)
    found = Talk(engine.decoder)
    say(found)
    assert sum(rows.start > 0 for rows in slices) > 50
    engine.close()
    check_rows(path, say, settings, found)


@pytest.mark.parametrize(
    ("name", "quantisation", "options"),
    [
        pytest.param("qwen3moe", "Q4_0", {"repack": "on", "threads": 2}, marks=needs_default_kernels),
        ("gpt-oss", None, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@in_child
def test_experts_by_slice(name: str, quantisation: str | None, options: dict[str, object], folder: Path) -> None:
    """A pass whose experts have no room together, not even in one tensor, multiplies by some rows of each at a time."""
    scale = 2 if name == "qwen3moe" else 1
    path, settings = make_model(name, folder, scale=scale, quantisation=quantisation), {**OPTIONS, **options}
    slices = count_slices()
    with fewest_frames(0.25):
        engine = open_at(path, 0, settings, chunk_bytes=PAGE)
    found = Talk(engine.decoder)
    say(found)
    assert sum(rows.start > 0 for rows in slices) > 20
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()
    check_rows(path, say, settings, found)


@in_child
def test_branches_by_slice(folder: Path) -> None:
    path, settings = make_model("llama", folder), {**OPTIONS, "sequences": SEQUENCES}
    slices = count_slices()
    engine = open_at(path, 0.1, settings, chunk_bytes=2 * PAGE)
    found = Talk(engine.decoder)
    say_in_branches(found)
    assert len(slices) > 100
    engine.close()
    check_rows(path, say_in_branches, settings, found)


@pytest.mark.parametrize(("name", "share"), [("gemma3", 0), ("qwen3moe", 0.25)])
@in_child
def test_a_pass_that_ends_between_slices_leaves_nothing_behind(name: str, share: float, folder: Path) -> None:
    """Reads that fail, or another thread cancels: what is decoded afterwards is right, also where llama.cpp is asked to
    compute the same graph again, in which nodes were left out.
    """
    path, saboteur = make_model(name, folder), sabotage()
    with fewest_frames(share):
        engine = open_at(path, 0, OPTIONS, chunk_bytes=8 * PAGE)
    wanted, n_errors, n_cancelled = decode_anew(engine), 0, 0
    for fails_at in (1, 2, 30, 31, 100, 333):
        saboteur.set(fails_at, 60)  # reads ahead are tried again
        try:
            decode_anew(engine)
        except TierReadError:
            n_errors += 1
        saboteur.set(-(10**9))
        assert np.array_equal(decode_anew(engine), wanted)
    whole_s = float("inf")
    for _ in range(3):
        started_s = time.monotonic()
        decode_anew(engine)
        whole_s = min(whole_s, time.monotonic() - started_s)
    for moment in range(10):
        timer = threading.Timer(whole_s * moment / 10, engine.interrupt.cancel)
        timer.start()
        try:
            decode_anew(engine)
        except Cancelled:
            n_cancelled += 1
        timer.join()
        engine.interrupt.reset()
        assert np.array_equal(decode_anew(engine), wanted)
    assert n_errors >= 3
    assert n_cancelled >= 3
    engine.close()


@in_child
def test_slices_of_a_product_share_a_graph(folder: Path) -> None:
    """It is made once for each product of a pass, and changed for each slice."""
    describe, described, slices = RowProducts._describe, list[int](), count_slices()

    def count(self: RowProducts, address: int) -> object:
        described.append(address)
        return describe(self, address)

    RowProducts._describe = count  # type: ignore[method-assign, assignment]
    with fewest_frames(0):
        engine = open_at(make_model("llama", folder), 0.0, OPTIONS, chunk_bytes=2 * PAGE)
    decode_anew(engine)
    assert len(described) == sum(rows.start == 0 for rows in slices)
    assert len(slices) > 3 * len(described)
    engine.close()


def decode_anew(engine: Engine) -> np.ndarray:
    """The logits of a prompt, and of tokens after it one by one."""
    engine.decoder.clear()
    talk = Talk(engine.decoder)
    talk.prompt(20)
    talk.step(2)
    return np.concatenate(talk.rows)


def count_slices() -> list[range]:
    """The rows of every slice that is multiplied by from now on."""
    multiply, slices = RowProducts.multiply, list[range]()

    def count(self: RowProducts, address: int, rows: range) -> None:
        slices.append(rows)
        multiply(self, address, rows)

    RowProducts.multiply = count  # type: ignore[method-assign]
    return slices
