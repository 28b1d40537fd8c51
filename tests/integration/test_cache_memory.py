"""Caches that take no memory before they are written to: the logits are the same, and memory grows with the text."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_groups import control_group
from edge_run.base.config import ModelConfig
from edge_run.base.errors import KernelError
from edge_run.base.protocols import BatchToken
from edge_run.base.units import GIB, MIB, round_up
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver
from edge_run.runtime.llama import cache_memory
from edge_run.runtime.llama.cache_memory import HUGE_PAGE
from edge_run.runtime.llama.context_shape import context_shape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.tiers import _libc
from in_child import in_child
from kit_models import KIT
from tiny_models import N_VOCAB, make_model

TOKEN_BYTES = 2048  # of keys and values in the tiny model of llama
# Of grouped heads, one of whose caches has a sliding window, of latent attention, with states beside one layer of
# attention, and with nothing but states.
MODELS = ["llama", "gemma3", "gemma3n", "deepseek2", "jamba", "mamba", "qwen4exp"]


@contextmanager
def decoder_of(path: Path, *, is_sparse: bool, **options: Any) -> Iterator[LocalDecoder]:
    settings = {"context_tokens": 16_384, "micro_batch_tokens": 64, "outputs_per_pass": 64, "threads": 1, **options}
    shape = context_shape(ModelConfig(**settings), 0, 1)
    with LlamaModel([path]) as model:
        context = LlamaContext(model, shape, is_sparse=is_sparse)
        decoder = LocalDecoder(model, context, Driver(), shape)
        try:
            yield decoder
        finally:
            decoder.close()
            context.close()


def told(decoder: LocalDecoder) -> list[np.ndarray]:
    """The logits of a prompt, of single tokens, of others in place of those, and of all anew."""
    tokens = np.random.default_rng(0).integers(1, N_VOCAB, 300).tolist()
    rows = []

    def say(start: int, *sizes: int) -> None:
        for size in sizes:
            batch = [BatchToken(tokens[7 * i % 300], i, 0, True) for i in range(start, start + size)]
            rows.append(decoder.decode(batch).copy())
            start += size

    say(0, 150, 1, 1, 1, 90, 1)
    say(decoder.rewind(0, 120), 1, 1, 64, 1)
    decoder.clear()
    say(0, 30, 1, 200, 1)
    return rows


def compare(path: Path, **options: Any) -> int:
    """Assert that the logits are the same; return what takes no memory at first."""
    with decoder_of(path, is_sparse=False, **options) as full:
        wanted = told(full)
        assert full._context.untouched_bytes == 0
    with decoder_of(path, is_sparse=True, **options) as sparse:
        found = told(sparse)
        untouched_bytes = sparse._context.untouched_bytes
    assert all(np.isfinite(rows).all() for rows in wanted)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True)), (path.name, options)
    return untouched_bytes


# In processes whose allocators have nothing to spare, so that no cache comes from a heap.


@in_child
def _the_same(paths: list[Path]) -> None:
    found = {path.name.split("-")[0]: compare(path) for path in paths}
    assert found.pop("mamba") == 0
    assert all(size_bytes > 7 * MIB for size_bytes in found.values()), found


def test_the_logits_are_the_same(folder: Path) -> None:
    _the_same(paths=[*(make_model(name, folder) for name in MODELS), KIT])


@in_child
def test_a_cache_is_not_cut_from_what_was_freed_in_the_heap(llama: Path) -> None:
    _libc.map_large_allocations(4 * MIB)  # as the first context does
    pieces = [bytearray(MIB) for _ in range(80)]
    last = bytearray(MIB)  # so that the heap does not shrink
    del pieces
    assert compare(llama) > 12 * MIB
    assert len(last) == MIB


@in_child
def test_and_so_they_are_of_other_caches(llama: Path) -> None:
    several: list[dict[str, Any]] = [
        {"kv_type": "q8_0"},
        {"kv_type": "q8_0/q4_0"},
        {"flash_attention": "off"},
        {"sequences": 4},
    ]
    for options in several:
        assert compare(llama, **options) > 12 * MIB, options


@pytest.mark.parametrize("is_mapped_first", [False, True])
@in_child
def test_a_cache_is_found_beside_memory_that_is_mapped_meanwhile(is_mapped_first: bool, llama: Path) -> None:
    """The kernel joins the two: as Python's own memory, which also grows while mappings are listed."""
    listed = cache_memory._anonymous
    mapped = []

    def growing() -> list[tuple[int, int]]:
        found = [] if is_mapped_first else listed()
        mapped.append(mmap.mmap(-1, 48 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return listed() if is_mapped_first else found

    cache_memory._anonymous = growing
    assert compare(llama) > 12 * MIB
    assert len(mapped) > 1


@in_child
def test_a_cache_is_found_where_other_memory_was_just_before(llama: Path) -> None:
    """As Python gives memory back when it has listed what is mapped, and the cache takes its place, and more."""
    listed = cache_memory._anonymous
    n_listed = 0

    def giving_back() -> list[tuple[int, int]]:
        nonlocal n_listed
        n_listed += 1
        with mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            return listed()

    cache_memory._anonymous = giving_back
    assert compare(llama) > 12 * MIB
    assert n_listed > 1


@pytest.mark.parametrize("forbidden", ["files in memory", "own memory as a file"])
@in_child
def test_where_a_sandbox_forbids_what_it_takes_caches_have_all_their_memory(forbidden: str, llama: Path) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if forbidden == "files in memory":
        _libc.memory_file = refuse
    else:
        cache_memory.open = refuse  # type: ignore[attr-defined]
    assert compare(llama) == 0


@in_child
def test_memory_grows_with_the_text_and_no_faster(llama: Path) -> None:
    before = process_memory().resident_bytes
    with decoder_of(llama, is_sparse=True, context_tokens=1 << 17, micro_batch_tokens=512) as decoder:
        assert decoder._context.untouched_bytes > 250 * MIB
        assert process_memory().resident_bytes < before + 32 * MIB
        assert process_memory().peak_bytes < before + 32 * MIB, "nor was more there for a moment"
        tokens = [BatchToken(1 + i % 300, i, 0) for i in range(4096)]
        decoder.follow(tokens[:1024])  # with what is computed in
        for stop in (2048, 3072, 4096):
            held = process_memory().resident_bytes
            decoder.follow(tokens[stop - 1024 : stop])
            grown = process_memory().resident_bytes - held
            assert 0.9 * 1024 * TOKEN_BYTES < grown < 1.2 * 1024 * TOKEN_BYTES + MIB


@in_child
def test_clearing_a_long_cache_takes_few_page_faults(llama: Path) -> None:
    """256 MiB are 65,536 pages, and as many faults where the kernel cannot join the pages of the piece beneath."""
    if not joins_pages():
        pytest.skip("this kernel does not join pages when asked to (Linux 6.1)")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with decoder_of(llama, is_sparse=True, context_tokens=1 << 17) as decoder:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert decoder._context.untouched_bytes > 250 * MIB
    assert faults < 16_384, faults


def joins_pages() -> bool:
    """Whether another mapping of a joined piece takes one page fault for many pages."""
    descriptor = os.memfd_create("joined")
    try:
        os.ftruncate(descriptor, HUGE_PAGE)
        at = round_up(_libc.map_anonymous(4 * HUGE_PAGE), HUGE_PAGE)
        for address in (at, at + HUGE_PAGE):
            _libc.map_shared(descriptor, HUGE_PAGE, at=address)
        _libc.join_pages(at, HUGE_PAGE)
        other = _libc.view(at + HUGE_PAGE, HUGE_PAGE)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for offset in range(0, HUGE_PAGE, _libc.PAGE):
            other[offset] = 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 300
    finally:
        os.close(descriptor)


@in_child
def test_closing_frees_all_of_it(llama: Path) -> None:
    def held() -> tuple[int, int]:
        return process_memory().resident_bytes, len(Path("/proc/self/maps").read_text().splitlines())

    def once() -> None:
        with decoder_of(llama, is_sparse=True) as decoder:
            decoder.follow([BatchToken(1 + i, i, 0) for i in range(200)])

    for _ in range(3):
        once()
    resident_bytes, n_mappings = held()
    for _ in range(20):
        once()
    assert held()[0] < resident_bytes + 4 * MIB, "20 times what was written would be twice that; the heap varies"
    assert held()[1] <= n_mappings + 3


@in_child
def test_a_context_that_cannot_be_made_leaves_nothing_behind(llama: Path) -> None:
    """What it computes in has no room, when its caches are there already."""
    options: dict[str, Any] = {"context_tokens": 1 << 15, "micro_batch_tokens": 512, "flash_attention": "off"}
    with decoder_of(llama, is_sparse=True, context_tokens=1024, micro_batch_tokens=16):
        pass
    before, mapped = process_memory(), Path("/proc/self/statm").read_text()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(mapped.split()[0]) * resource.getpagesize() + 128 * MIB, usual[1]))
    try:
        with pytest.raises(KernelError, match="allocate"), decoder_of(llama, is_sparse=True, **options):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    after = process_memory()
    assert after.data_bytes < before.data_bytes + 16 * MIB, "the caches are still mapped"
    assert after.resident_bytes < before.resident_bytes + 8 * MIB
    assert after.peak_bytes < before.peak_bytes + 32 * MIB
    assert compare(llama) > 0, "and another one can be made"


@in_child
def _more_than_memory(path: Path, group: Path) -> None:
    """Open a context of 1 GiB where 256 MiB is all there is, and use it."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    with decoder_of(path, is_sparse=True, context_tokens=1 << 19) as decoder:
        assert decoder._context.untouched_bytes > 0.99 * GIB
        rows = told(decoder)
    with decoder_of(path, is_sparse=False, context_tokens=4096) as decoder:
        wanted = told(decoder)
    assert all(np.array_equal(a, b) for a, b in zip(wanted, rows, strict=True))


@pytest.mark.root
def test_a_context_that_is_larger_than_memory_opens(llama: Path) -> None:
    limit = str(256 * MIB)
    new = {"memory.max": limit, "memory.swap.max": "0"}
    with control_group(new, "memory", {"memory.limit_in_bytes": limit, "memory.swappiness": "0"}) as group:
        _more_than_memory(path=llama, group=group)


@in_child
def test_logits_of_as_many_tokens_as_may_have_some_are_in_the_buffers() -> None:
    """llama.cpp reports room for one token's at first, and makes more in the first pass that has more."""
    n_outputs = 1024  # 16 MiB of logits, twice: as the graph computes them, and as they are kept
    with decoder_of(
        KIT, is_sparse=False, context_tokens=n_outputs, micro_batch_tokens=n_outputs, outputs_per_pass=n_outputs
    ) as decoder:
        context = decoder._context
        held, before = context.buffer_bytes + context.kv_bytes, process_memory().resident_bytes
        decoder.follow([BatchToken(5, position, 0, True) for position in range(n_outputs)])
        grown = process_memory().resident_bytes - before
        logits_bytes = 4 * n_outputs * decoder._model.vocabulary
        assert logits_bytes == 16 * MIB
        assert 2 * logits_bytes < grown <= held
