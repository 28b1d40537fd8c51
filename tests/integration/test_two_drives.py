"""A model that is read from two files: logits are llama.cpp's, whatever becomes of one of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ModelFileError, ModelFileMissing, TierReadError
from edge_run.base.protocols import BatchToken
from edge_run.base.units import KIB
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share
from exactness import open_at, run
from in_child import in_child
from program import run_program
from slices import QueueTransport
from tiny_models import make_model, split_model

OPTIONS: dict[str, object] = {
    "context_tokens": 256,
    "micro_batch_tokens": 32,
    "threads": 1,
    "readers": 2,
    "outputs_per_pass": 32,
}
TOKENS = [(7 * i) % 250 + 3 for i in range(48)]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """A model in two files, with a copy in `copy`."""
    shards = split_model(make_model("llama", tmp_path), 2, tmp_path)
    (tmp_path / "copy").mkdir()
    for shard in shards:
        shutil.copy(shard, tmp_path / "copy")
    return shards


def logits_of(engine: Engine) -> np.ndarray:
    return np.concatenate([np.atleast_2d(rows) for rows in run(engine, TOKENS, 40)])


def refuse_files_in(folder: Path) -> Callable[[int, Sequence[memoryview], int], int]:
    """Let reads of the files in `folder` fail, as a drive does that is broken."""
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, list(buffers), offset)

    os.preadv = preadv  # type: ignore[assignment]
    return real


@in_child
def test_logits_are_llama_cpps_while_either_drive_fails(shards: list[Path]) -> None:
    copy = shards[0].parent / "copy"
    whole = Engine.open(shards[0], ModelConfig(memory="1GiB", **OPTIONS))
    wanted = logits_of(whole)
    whole.close()
    engine = open_at(shards[0], 0.3, {**OPTIONS, "also": copy})
    lines: list[str] = []
    engine.tell(lines.append)
    assert any(item.what == "also" for item in engine.plan.items)
    for broken in (None, copy, shards[0].parent):
        real = refuse_files_in(broken) if broken else os.preadv
        lines.clear()
        engine.decoder.clear()
        assert np.array_equal(logits_of(engine), wanted)
        os.preadv = real  # type: ignore[assignment]
        assert [line for line in lines if "Input/output error" in line and "read again from" in line] or not broken
    assert 0 < engine.read_totals.copy_bytes < engine.read_totals.bytes_read
    assert engine.read_totals.repeated_reads > 0
    assert engine.memory_use.peak_bytes <= engine.budget_bytes
    engine.close()


@in_child
def test_a_model_that_fits_is_read_from_both_too(shards: list[Path]) -> None:
    copied = shards[0].parent / "copy" / shards[1].name
    os.truncate(copied, 4096)
    with pytest.raises(ModelFileError, match="no copy of"):
        Engine.open(shards[0], ModelConfig(also=shards[0].parent / "copy", **OPTIONS))
    copied.unlink()
    with pytest.raises(ModelFileMissing, match=f"{copied}: cannot be opened"):
        Engine.open(shards[0], ModelConfig(also=shards[0].parent / "copy", **OPTIONS))
    shutil.copy(shards[1], shards[0].parent / "copy")
    engine = Engine.open(
        shards[0], ModelConfig(memory="1GiB", also=shards[0].parent / "copy", page_cache="off", **OPTIONS)
    )
    first = logits_of(engine)
    assert engine.plan.mode == "resident"
    assert 0 < engine.read_totals.copy_bytes < shards[0].stat().st_size + shards[1].stat().st_size
    engine.close()
    alone = Engine.open(shards[0], ModelConfig(memory="1GiB", **OPTIONS))
    assert np.array_equal(first, logits_of(alone))
    assert alone.read_totals.copy_bytes == 0
    alone.close()


@in_child
def test_where_both_fail_it_is_an_error_and_all_goes_on_when_they_are_back(shards: list[Path]) -> None:
    engine = open_at(shards[0], 0.3, {**OPTIONS, "also": shards[0].parent / "copy"})
    wanted = logits_of(engine)
    real = os.preadv
    for folder in (shards[0].parent, shards[0].parent / "copy"):
        refuse_files_in(folder)
    engine.decoder.clear()
    with pytest.raises(TierReadError, match="Input/output error"):
        logits_of(engine)
    os.preadv = real
    engine.decoder.clear()
    assert np.array_equal(logits_of(engine), wanted)
    engine.close()


@in_child
def test_a_slice_counts_what_the_copy_gave_once(shards: list[Path]) -> None:
    """Whatever it gave up and took anew meanwhile: both drives stay open."""
    config = ModelConfig(memory="2GiB", also=shards[0].parent / "copy", chunk_bytes=16 * KIB, **OPTIONS)
    engine = SliceEngine.open(shards[0], config)
    assert engine.loaded.backing is not None
    drives = engine.loaded.backing.drives
    assert drives is not None
    for _ in range(2):
        engine.assign(Share(("a",) * len(engine.layout.units), "a"), QueueTransport({}, "a"))
        engine.decoder.decode([BatchToken(1, 0, 0, True)])
        engine.release()
        assert 0 < engine.read_totals.copy_bytes < engine.read_totals.bytes_read
        assert engine.read_totals.copy_bytes == drives.totals.copy_bytes
    engine.close()


def test_doctor_compares_the_copy(shards: list[Path]) -> None:
    also = shards[0].parent / "copy"
    found = run_program("doctor", shards[0], "--also", also, folder=shards[0].parent)
    assert "reading both gains nothing" in found.stdout
    os.truncate(also / shards[1].name, 4096)
    found = run_program("doctor", shards[0], "--also", also, folder=shards[0].parent)
    assert "4096 bytes instead of" in found.stdout
    assert found.returncode == 1
