"""The prompt cache: what comes back from disk has the bits that reading the whole prompt in one go computes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping import restoring
from edge_run.runtime.keeping.opening import open_keeper
from in_child import in_child
from kept_prompts import OPTIONS, OURS, TOKENS, WIDTH, opened, same, talk, talks
from program import Program, begin
from tiny_models import make_model, make_trained_on

# Attention alone, latent, shared and looped; windows; recurrent, with and without layers of attention; compressed.
ROWS = ["llama", "gpt2", "deepseek2", "hrm_text", "qwen3moe", "minicpm3"]
SNAPSHOTS = ["gemma3", "gemma3n", "mamba", "rwkv7", "jamba", "falcon-h1", "deepseek4"]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of the cache."""
    return tmp_path / "kept"


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
    compare(make_model(name, folder), kept, [0, 512, 512, 512])


@pytest.mark.parametrize("name", SNAPSHOTS)
@in_child
def test_what_is_not_by_token_comes_back_as_it_was(name: str, folder: Path, kept: Path) -> None:
    """The third prompt parts from the others before the snapshot: it leaves one where they part."""
    path = make_model(name, folder)
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
    path = make_trained_on(4096, name, folder)
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
    compare(make_model("llama", folder), kept, [0, at, at, at], **options)


@in_child
def test_where_the_width_of_passes_does_not_matter_every_row_is_kept(folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
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
        path, place = make_model(name, folder), kept / name
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


@in_child
def test_a_model_whose_file_was_replaced_once_it_was_open_has_no_cache(folder: Path, kept: Path) -> None:
    """Else its rows would be kept, and found, as those of the file that took its place."""
    path, said = make_model("llama", folder), list[str]()
    engine = Engine.open(path, ModelConfig(**OPTIONS, **OURS, prompt_cache=kept))
    try:
        copy = Path(shutil.copy(path, folder / "copy.gguf"))
        with copy.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        copy.replace(path)
        assert open_keeper(engine, said.append) is None
        assert len(said) == 1
        assert "changed" in said[0]
    finally:
        engine.close()


@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "swap"])
@in_child
def test_a_damaged_block_is_computed_again(harm: str, folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
    wanted = talks(path, kept, TOKENS[:900])[0]
    blocks = sorted(kept.rglob("*.rows"))
    assert [block.name[:6] for block in blocks] == ["000000", "000001", "000002"]
    content = blocks[1].read_bytes()
    if harm == "flip":
        blocks[1].write_bytes(content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:])
    elif harm == "cut":
        blocks[1].write_bytes(content[:5000])
    elif harm == "swap":
        blocks[1].write_bytes(blocks[2].read_bytes())
    else:
        blocks[1].unlink()
    with opened(path, kept) as (session, _, said):
        found = talk(session, TOKENS[:900])
        assert len(said) == (harm != "remove")
        assert found[1] == 256
        assert same(found, wanted)
    assert talks(path, kept, TOKENS[:900])[0][1] == 768, "what was damaged is whole again"


@pytest.mark.parametrize("n_failing", ["1", "9"])
@in_child
def test_a_snapshot_that_cannot_be_read_stays(n_failing: str, folder: Path, kept: Path) -> None:
    path = make_model("gemma3", folder)
    wanted = talks(path, kept, TOKENS[:900])[0]
    (snapshot,) = (one for one in kept.rglob("*.rows") if one.name.startswith("000003"))
    real, n_reads = restoring.read_rows, 0

    def read(place: Path, *rest: Any) -> None:
        nonlocal n_reads
        n_reads += place == snapshot
        if place == snapshot and n_reads <= int(n_failing):
            raise OSError(errno.EIO, "Input/output error", str(place))
        real(place, *rest)

    with opened(path, kept) as (session, _, said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "read_rows", read)
        found = talk(session, TOKENS[:900])
        assert same(found, wanted)
        assert (found[1] > 0, len(said), n_reads) == ((True, 1, 2) if n_failing == "1" else (False, 2, 2))


@in_child
def test_a_damaged_snapshot_is_computed_again(folder: Path, kept: Path) -> None:
    path = make_model("gemma3", folder)
    wanted = talks(path, kept, TOKENS[:900])[0]
    (snapshot,) = (one for one in kept.rglob("*.rows") if one.name.startswith("000003"))
    content = bytearray(snapshot.read_bytes())
    content[len(content) // 2] ^= 4
    snapshot.write_bytes(content)
    with opened(path, kept) as (session, _, said):
        found = talk(session, TOKENS[:900])
        assert len(said) == 1
        assert found[1] == 0
        assert same(found, wanted)


@in_child
def test_a_drive_that_became_read_only_ends_no_answer(folder: Path, kept: Path) -> None:
    """As Linux makes a drive read-only after errors: what is damaged, or of no use any more, cannot be removed."""
    path = make_model("gemma3", folder)
    wanted = talks(path, kept, TOKENS[:900])[0]
    for one in kept.rglob("*.rows"):
        one.write_bytes(bytes(one.stat().st_size))

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with opened(path, kept) as (session, keeper, said), pytest.MonkeyPatch.context() as patch:
        assert keeper
        keeper.keeps_answers = True
        patch.setattr(Path, "unlink", unlink)
        assert same(talk(session, TOKENS[:900]), wanted)
        assert said
        for turn in range(4):
            talk(session, [*session.history, *TOKENS[50 * turn : 50 * turn + 10]])


@in_child
def test_what_is_of_no_use_any_more_is_removed_and_said(folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
    talks(path, kept, TOKENS[:600])
    os.utime(path)
    with opened(path, kept) as (session, _, said):
        assert "removed" in said[0]
        assert talk(session, TOKENS[:600])[1] == 0
    assert len(list(kept.rglob("*.rows"))) == 2


@in_child
def test_a_folder_keeps_to_its_size(folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
    talks(path, kept, TOKENS[:600])
    block_bytes = next(kept.rglob("*.rows")).stat().st_size
    limit = 3 * block_bytes + 100
    for start in (100, 200, 300):
        talks(path, kept, TOKENS[start : start + 600], prompt_cache_size=limit)
        assert sum(one.stat().st_size for one in kept.rglob("*.rows")) <= limit
    assert talks(path, kept, TOKENS[300:900], prompt_cache_size=limit)[0][1] == 512
    with opened(path, kept, prompt_cache_size=block_bytes - 1) as (session, _, said):
        talk(session, TOKENS[400:1000])
        session.finish()
        deadline = time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            session.finish()
            time.sleep(0.01)
        assert "nothing more is kept" in said[0]


@in_child
def test_only_the_latest_turns_of_a_conversation_have_snapshots(folder: Path, kept: Path) -> None:
    with opened(make_model("mamba", folder), kept) as (session, keeper, _):
        assert keeper
        keeper.keeps_answers = True
        for turn in range(6):
            talk(session, [*session.history, *TOKENS[50 * turn : 50 * turn + 30]])
            session.finish()  # once more changes nothing
        (tokens, passes), at = (keeper.rows.tokens, keeper.rows.passes), keeper._search.snapshot_path
        assert len(list(kept.rglob("*.rows"))) == 2
        assert at(tokens, passes).exists()


@pytest.mark.parametrize("n_cells", [64, 512], ids=["while cells are placed", "while rows are read"])
@in_child
def test_stopped_while_it_reads_leaves_an_empty_context(n_cells: int, folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
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


_WORK = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from kept_prompts import TOKENS, opened, talk
print("ready", flush=True)
for number in range(1000):
    with opened(Path({model!r}), Path({kept!r})) as (session, keeper, _):
        keeper.keeps_answers = True
        talk(session, TOKENS[: 300 + 37 * number % 500], 60)
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_half(folder: Path, kept: Path) -> None:
    path = make_model("llama", folder)
    prompt = TOKENS[:800]
    (wanted,) = talks(path, None, prompt)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    work = _WORK.format(paths=paths, model=str(path), kept=str(kept))
    rng = random.Random(0)
    for _ in range(8):
        with begin(Program(["-c"], source=work), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.8))
            process.send_signal(signal.SIGKILL)
        with opened(path, kept) as (session, _, said):
            found = talk(session, prompt)
            assert not said
            assert same(found, wanted)
    assert found[1] >= 512
