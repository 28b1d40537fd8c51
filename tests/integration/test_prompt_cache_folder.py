"""The folder of the prompt cache: what is damaged in it, of no use or too much, and who is killed while it writes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping import restoring
from edge_run.runtime.keeping.opening import open_keeper
from in_child import in_child
from kept_prompts import OPTIONS, OURS, TOKENS, opened, same, talk, talks
from program import Program, begin
from tiny_models import make_model


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
