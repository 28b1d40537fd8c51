"""The prompt cache: what comes back from disk has the bits that reading the whole prompt in one go computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import Cancelled
from in_child import in_child
from kept_prompts import TOKENS, WIDTH, opened, same, talk, talks
from tiny_models import make_model, make_narrow

# Attention alone, latent, shared and looped; windows; recurrent, with and without layers of attention; compressed.
ROWS = ["llama", "gpt2", "deepseek2", "hrm_text", "qwen3moe", "minicpm3"]
SNAPSHOTS = ["gemma3", "gemma3n", "mamba", "rwkv7", "jamba", "falcon-h1", "deepseek4"]


def compare(path: Path, kept: Path, expected: Sequence[int], **options: Any) -> None:
    """A prompt, the same again, one that ends elsewhere, one that goes on: all as without a cache."""
    prompts = TOKENS[:600], TOKENS[:600], [*TOKENS[:560], *TOKENS[700:800]], TOKENS[:850]
    wanted = talks(path, None, *prompts, **options)
    found = talks(path, kept, *prompts, **options)
    assert [cached for _, cached in found] == list(expected)
    assert all(np.isfinite(rows).all() for rows, _ in wanted)
    assert all(map(same, found, wanted))


@pytest.mark.parametrize("name", ROWS)
@in_child
def test_rows_come_back_as_they_were(name: str, folder: Path, kept: Path) -> None:
    compare(make_narrow(name, folder), kept, [0, 512, 512, 512])


@pytest.mark.parametrize("name", SNAPSHOTS)
@in_child
def test_what_is_not_by_token_comes_back_as_it_was(name: str, folder: Path, kept: Path) -> None:
    """The third prompt parts from the others before the snapshot: it leaves one where they part."""
    path = make_narrow(name, folder)
    prompts = TOKENS[:350], TOKENS[:350], [*TOKENS[:310], *TOKENS[700:800]], TOKENS[:600]
    last = [*TOKENS[:310], *TOKENS[600:700]]
    *wanted, wanted_again = talks(path, None, *prompts, last)
    found = talks(path, kept, *prompts)
    assert [cached for _, cached in found][:2] == [0, 320]
    assert found[3][1] == 320
    assert all(map(same, found, wanted))
    (again,) = talks(path, kept, last)
    has_rows = name not in ("mamba", "rwkv7", "deepseek4")
    assert again[1] == (256 if has_rows else 0)
    assert same(again, wanted_again)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*ROWS, *SNAPSHOTS) if name != "deepseek4"),
        ("llama", {"flash_attention": "off"}),
        ("llama", {"kv_type": "q8_0", "flash_attention": "on"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
@in_child
def test_rows_are_found_in_contexts_of_other_lengths(
    name: str, options: dict[str, Any], folder: Path, kept: Path
) -> None:
    """As free memory changes, so does the length that a context has by default."""
    path = make_narrow(name, folder, 4096)
    talks(path, kept, TOKENS[:600], context_tokens=2048, **options)
    for tokens in (1024, 4096):
        wanted = talks(path, None, TOKENS[:600], context_tokens=tokens, **options)[0]
        found = talks(path, kept, TOKENS[:600], context_tokens=tokens, **options)[0]
        assert found[1] >= 512
        assert same(found, wanted)


@pytest.mark.parametrize(
    ("name", "lengths", "is_same"),
    [
        ("gemma3", (1024, 256), False),  # whose ring would be longer than the context
        ("phi3", (1024, 256), False),  # other factors
        ("phi3", (1024, 2048), True),
        ("deepseek4", (1024, 2048), False),  # compressed states, one for so many tokens of the context
    ],
)
@in_child
def test_the_length_counts_where_it_changes_what_is_computed_or_kept(
    name: str, lengths: tuple[int, int], is_same: bool, folder: Path, kept: Path
) -> None:
    keys = set()
    for tokens in lengths:
        with opened(make_model(name, folder), kept, context_tokens=tokens) as (_, keeper, _said):
            assert keeper
            keys.add(keeper._key)
    assert (len(keys) == 1) == is_same


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attention": "off"},
        {"kv_type": "q8_0", "flash_attention": "on"},
        {"micro_batch_tokens": 48},
        {"micro_batch_tokens": 512},
        {"sequences": 3, "outputs_per_pass": 3},
        {"exact": True, "sequences": 2, "context_tokens": 2048},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@in_child
def test_other_numerics(options: dict[str, Any], folder: Path, kept: Path) -> None:
    width = options.get("micro_batch_tokens", WIDTH)
    at = 512 // width * width
    compare(make_narrow("llama", folder), kept, [0, at, at, at], **options)


@in_child
def test_where_the_width_of_passes_does_not_matter_every_row_is_kept(folder: Path, kept: Path) -> None:
    path = make_narrow("llama", folder)
    tokens = TOKENS[:500] + TOKENS[900:905] + TOKENS[600:720]
    wanted = talks(path, None, tokens, TOKENS[:500] + TOKENS[900:905] + TOKENS[100:150], exact=True)
    with opened(path, kept, exact=True) as (session, keeper, _):
        assert keeper
        keeper.keeps_answers = True
        talk(session, TOKENS[:500])
        found, cached = talk(session, tokens)
        assert cached == 505
        assert same((found, 0), wanted[0])
    found = talks(path, kept, TOKENS[:500] + TOKENS[900:905] + TOKENS[100:150], exact=True)[0]
    assert found[1] == 256
    assert same(found, wanted[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@in_child
def test_streamed_with_lent_memory(name: str, folder: Path, kept: Path) -> None:
    path = make_model(name, folder, scale=4)
    compare_with = talks(path, None, TOKENS[:700], TOKENS[:850])
    kept = [
        talks(path, kept, prompt, share=share)[0]
        for share, prompt in ((0.2, TOKENS[:700]), (0.2, TOKENS[:700]), (0.3, TOKENS[:850]))
    ]
    assert kept[0][1] == 0
    assert min(kept[1][1], kept[2][1]) >= 512
    assert same(kept[0], compare_with[0])
    assert same(kept[1], compare_with[0])
    assert same(kept[2], compare_with[1])


@in_child
def test_a_conversation_goes_on_as_if_it_had_not_been_interrupted(folder: Path, kept: Path) -> None:
    """Its rows come from prompts of any length and from single tokens; what no block has is computed anew."""
    for name in ("llama", "gemma3", "mamba"):
        path, place = make_narrow(name, folder), kept / name
        with opened(path, place) as (session, keeper, _):
            assert keeper
            keeper.keeps_answers = True
            talk(session, TOKENS[:300], 40)
            history = list(session.history)
            talk(session, [*history, *TOKENS[500:650]], 30)
            keeper.flush()
            rows, text = keeper.rows, list(session.history)
            logits, cached = session.feed([*text, *TOKENS[:20]])
            wanted = logits.copy()
            assert cached == len(text) == 520
        with opened(path, place) as (session, keeper, said):
            assert keeper
            keeper.expect(rows)
            logits, cached = session.feed([*text, *TOKENS[:20]])
            assert not said
            assert cached == (512 if name == "llama" else 520), name
            if cached == 520:
                assert np.array_equal(logits, wanted)
            else:  # the last tokens came one by one: the same again
                session.keeper = None
                held = session._cut(512)
                for token in text[held:]:
                    session.step(token)
                assert np.array_equal(session.feed([*text, *TOKENS[:20]])[0], wanted)


@pytest.mark.parametrize("n_cells", [64, 512], ids=["while cells are placed", "while rows are read"])
@in_child
def test_stopped_while_it_reads_leaves_an_empty_context(n_cells: int, folder: Path, kept: Path) -> None:
    path = make_narrow("llama", folder)
    wanted = talks(path, kept, TOKENS[:600])[0]
    with opened(path, kept) as (session, keeper, _):
        assert keeper
        restorer, placed = keeper._restorer, list[int]()

        def check() -> None:
            placed.append(restorer._decoder._lengths()[0])
            if placed[-1] >= n_cells:
                raise Cancelled("stop")

        real, restorer._check = restorer._check, check
        with pytest.raises(Cancelled):
            session.feed(TOKENS[:600])
        assert placed[-1] == n_cells
        assert session.history == []
        restorer._check = real
        found = talk(session, TOKENS[:600])
        assert found[1] == 512
        assert same(found, wanted)
