"""Stubs: what llama.cpp is shown in place of the model, and that nothing of it stays behind."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_run.base.errors import ModelFileError, TierReadError
from edge_run.tiers.gguf import Shard
from edge_run.tiers.stub import Stubs
from mapped import PAGE, write_random

HEADER = 3 * PAGE + 17
SIZE = 40 * PAGE + 5


def shard_of(path: Path, number: int = 0, header_bytes: int = HEADER) -> Shard:
    write_random(path, SIZE, seed=number)
    return Shard(path, SIZE, header_bytes, header_bytes)


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    folder = tmp_path / "models"
    folder.mkdir()
    return [shard_of(folder / f"a model, née Ω-{i:05}-of-00002.gguf", i) for i in (1, 2)]


def test_a_stub_is_the_header_and_then_a_hole_of_the_models_size(shards: list[Shard], tmp_path: Path) -> None:
    with Stubs(shards, tmp_path / "cache") as stubs:
        for path, shard in zip(stubs.paths, shards, strict=True):
            data = path.read_bytes()
            assert data[:HEADER] == shard.path.read_bytes()[:HEADER]
            assert data[HEADER:] == bytes(SIZE - HEADER)
            assert path.stat().st_blocks * 512 < HEADER + 8 * PAGE, "the hole takes no space"
        stubs.cut()
        assert [path.stat().st_size for path in stubs.paths] == [HEADER, HEADER]


def test_spans_are_where_this_process_mapped_the_stubs(shards: list[Shard], tmp_path: Path) -> None:
    """As llama.cpp leaves them: the pages of the header unmapped, and a hole where tensors are not used."""
    with Stubs(shards, tmp_path / "cache with a space") as stubs:
        mappings = []
        for path in stubs.paths:
            with path.open("rb") as file:
                mappings.append(mmap.mmap(file.fileno(), SIZE - 2 * PAGE, prot=mmap.PROT_READ, offset=2 * PAGE))
        spans = sorted(stubs.spans(), key=lambda span: span.shard)
        assert [span.shard for span in spans] == [0, 1]
        for span in spans:
            assert span.start - span.base == 2 * PAGE
            assert span.stop - span.start == 39 * PAGE, "up to the end of the last page"
        for mapping in mappings:
            mapping.close()
        assert stubs.spans() == []


def test_nothing_stays_behind(shards: list[Shard], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    stubs = Stubs(shards, cache)
    assert list(cache.iterdir())
    stubs.close()
    stubs.close()
    assert list(cache.iterdir()) == []


def test_two_processes_may_load_the_same_model_at_once(shards: list[Shard], tmp_path: Path) -> None:
    with Stubs(shards, tmp_path) as one, Stubs(shards, tmp_path) as other:
        assert not set(one.paths) & set(other.paths)
        one.close()
        assert all(path.exists() for path in other.paths)


def test_stubs_of_a_killed_process_go_at_the_next_load(shards: list[Shard], tmp_path: Path) -> None:
    """SIGKILL while loading leaves a stub, whose header can be tens of MB; those of living processes stay."""
    cache = tmp_path / "cache"
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from edge_run.tiers.gguf import Shard\n"
        "from edge_run.tiers.stub import Stubs\n"
        "Stubs([Shard(Path(sys.argv[1]), int(sys.argv[2]), 100, 100)], Path(sys.argv[3]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, shards[0].path, str(SIZE), cache], check=False)
    assert len(list(cache.iterdir())) == 1
    with Stubs(shards, cache) as ours:
        assert len(list(cache.iterdir())) == 1
        with Stubs(shards, cache):
            assert len(list(cache.iterdir())) == 2
            assert all(path.exists() for path in ours.paths)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights(shards: list[Shard], tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(TierReadError, match=r"locked.*Permission denied.*--cache-dir"):
        Stubs(shards, folder / "cache")


def test_a_folder_that_is_a_file(shards: list[Shard], tmp_path: Path) -> None:
    """What root meets too: the path cannot be a folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierReadError, match=r"cannot make a folder.*--cache-dir"):
        Stubs(shards, tmp_path / "file" / "cache")


def test_a_model_that_cannot_be_read_any_more(shards: list[Shard], tmp_path: Path) -> None:
    shards[1].path.unlink()
    with pytest.raises(ModelFileError, match="cannot be opened"):
        Stubs(shards, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [], "the first stub is removed again"


@contextmanager
def small_disk(folder: Path, pages: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_is_told_with_what_was_needed_and_left_clean(shards: list[Shard], tmp_path: Path) -> None:
    header_bytes = 20 * PAGE
    large = [shard_of(shards[0].path, header_bytes=header_bytes)]
    with small_disk(tmp_path / "disk", pages=8) as disk:
        with pytest.raises(TierReadError, match=r"No space left on device.*--cache-dir") as caught:
            Stubs(large, disk)
        assert caught.value.figures == {"needed_bytes": header_bytes}
        assert list(disk.iterdir()) == []
