"""Stubs: what llama.cpp is shown in place of the model, and that nothing of it stays behind."""

from __future__ import annotations

import errno
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import BudgetError, EdgeRunError, ModelFileMissing, TierReadError
from edge_run.tiers import _libc
from edge_run.tiers.gguf_header import Shard
from edge_run.tiers.stub import Stubs
from mapped import PAGE, write_random

HEADER = 3 * PAGE + 17
SIZE = 40 * PAGE + 5


def shard_of(path: Path, number: int) -> Shard:
    write_random(path, SIZE, seed=number)
    return Shard(path, SIZE, HEADER, HEADER)


@pytest.fixture
def shards(tmp_path: Path) -> list[Shard]:
    folder = tmp_path / "models"
    folder.mkdir()
    return [shard_of(folder / f"a model, née Ω-{i:05}-of-00002.gguf", i) for i in (1, 2)]


def test_a_stub_is_the_header_and_then_a_hole_of_the_models_size(shards: list[Shard]) -> None:
    with Stubs(shards) as stubs:
        for path, shard in zip(stubs.paths, shards, strict=True):
            data = path.read_bytes()
            assert data[:HEADER] == shard.path.read_bytes()[:HEADER]
            assert data[HEADER:] == bytes(SIZE - HEADER)
            assert path.stat().st_blocks * 512 < HEADER + 8 * PAGE, "the hole takes no space"
        stubs.cut()
        assert [path.stat().st_size for path in stubs.paths] == [HEADER, HEADER]


def test_spans_are_where_this_process_mapped_the_stubs(shards: list[Shard]) -> None:
    """As llama.cpp leaves them: the pages of the header unmapped, and a hole where tensors are not used."""
    with Stubs(shards) as stubs:
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


def test_nothing_stays_behind(shards: list[Shard]) -> None:
    before = os.listdir("/proc/self/fd")
    stubs = Stubs(shards)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    stubs.close()
    stubs.close()
    assert os.listdir("/proc/self/fd") == before


def test_heads_of_our_own(shards: list[Shard]) -> None:
    """The tensors follow the head as they follow the header, and spans say where the file's bytes would be."""
    heads = [b"x" * (2 * PAGE + 17), b"y" * (HEADER + PAGE)]
    with Stubs(shards, heads) as stubs:
        for path, head in zip(stubs.paths, heads, strict=True):
            assert path.read_bytes() == head + bytes(SIZE - HEADER)
        with stubs.paths[0].open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            (span,) = stubs.spans()
            assert len(mapping) == SIZE - PAGE
        assert (span.shard, span.start - span.base) == (0, PAGE)
        stubs.cut()
        assert [path.stat().st_size for path in stubs.paths] == [len(head) for head in heads]


def test_the_same_model_twice_at_once(shards: list[Shard]) -> None:
    with Stubs(shards) as one, Stubs(shards) as other:
        with one.paths[0].open("rb") as file, mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ):
            assert (len(one.spans()), len(other.spans())) == (1, 0)
        one.close()
        assert all(path.exists() for path in other.paths)


def test_a_model_that_cannot_be_read_any_more(shards: list[Shard]) -> None:
    before = os.listdir("/proc/self/fd")
    shards[1].path.unlink()
    with pytest.raises(ModelFileMissing, match="cannot be opened"):
        Stubs(shards)
    assert os.listdir("/proc/self/fd") == before, "the first stub is let go again"


@pytest.mark.parametrize(
    ("place", "call", "code", "found"),
    [
        (_libc, "memory_file", errno.EPERM, r"refused \(Operation not permitted"),
        (os, "open", errno.ENOENT, r"/proc/self/fd/\d+: No such file or directory\); mount /proc"),
    ],
)
def test_a_system_that_allows_no_stubs_is_known_beforehand(
    place: Any, call: str, code: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container that forbids them, or has no /proc: llama.cpp's own loader runs the model then."""

    def refuse(path: str, *_: int) -> int:
        raise OSError(code, os.strerror(code), path)

    before = os.listdir("/proc/self/fd")
    assert _libc.why_unavailable() == ""
    with monkeypatch.context() as patch:
        patch.setattr(place, call, refuse)
        assert re.search(found, _libc.why_unavailable())
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (errno.EFBIG, TierReadError, "ulimit -f"),
        (errno.EIO, TierReadError, "check the drive"),
        (errno.ENOMEM, BudgetError, "smaller memory="),
    ],
)
def test_what_the_system_refuses_is_told_with_the_right_advice(
    shards: list[Shard], code: int, kind: type[EdgeRunError], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sendfile", refuse)
    with pytest.raises(kind, match=advice) as caught:
        Stubs(shards)
    assert str(shards[0].path) in str(caught.value)
    assert not isinstance(caught.value, TierReadError) or caught.value.errno == code


def test_a_header_that_is_copied_a_few_bytes_at_a_time(shards: list[Shard], monkeypatch: pytest.MonkeyPatch) -> None:
    real, n_calls = os.sendfile, 0

    def stingy(target: int, source: int, offset: int, count: int) -> int:
        nonlocal n_calls
        n_calls += 1
        return real(target, source, offset, min(count, 1000))

    monkeypatch.setattr(os, "sendfile", stingy)
    with Stubs(shards) as stubs:
        assert n_calls > len(shards) * HEADER // 1000
        for path, shard in zip(stubs.paths, shards, strict=True):
            assert path.read_bytes() == shard.path.read_bytes()[:HEADER] + bytes(SIZE - HEADER)


def test_a_model_that_is_shorter_by_now(shards: list[Shard]) -> None:
    os.truncate(shards[0].path, PAGE)
    with Stubs(shards) as stubs:
        assert stubs.paths[0].stat().st_size == SIZE
