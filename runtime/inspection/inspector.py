"""Finds out what llama.cpp makes of a model file, without reading weights: what an `Inspection` says.

The sizes of caches and buffers are told by a context that allocates nothing; the graph is that of a stub, in a context
as short as can be. A file that is to be opened is tried as well: its vocabulary is loaded, and a pass computed on
weights of zeros (`trial.py`). A broken file may end the process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, KernelError
from edge_run.base.units import round_down, round_up
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import Driver, PassShape
from edge_run.runtime.decoding.narrow_pass import NarrowPass, map_narrow_pass
from edge_run.runtime.decoding.short_pass import SHORT_CONTEXT_TOKENS
from edge_run.runtime.graph.cell_uses import cell_uses
from edge_run.runtime.graph.nodes import GraphMap, WeightRead
from edge_run.runtime.inspection.inspection import SHARD_BYTES, Inspection, pack_graph
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.runtime.inspection.model_kind import check_decoder_only
from edge_run.runtime.inspection.trial import Trial, try_vocabulary
from edge_run.runtime.llama.context_shape import ContextShape, context_shape
from edge_run.runtime.llama.model import LlamaContext, LlamaModel
from edge_run.tiers import _libc
from edge_run.tiers.address_space import AddressSpace, MappedSpan
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_header import ArrayValue
from edge_run.tiers.kv.cells import CellTensor
from edge_run.tiers.stub import Stubs, outline_heads, outline_metadata

LONG_CONTEXT_TOKENS = 1 << 20  # llama.cpp keeps some 50 bytes for each, even where it allocates no cache
SMALL_KV_TYPE = "q4_0"
TOKEN_BYTES, MERGE_BYTES = 165, 155  # in llama.cpp's tables, of ordinary words
TOKEN_S, MERGE_S = 1.4e-6, 0.5e-6


def inspect_here(path: Path, config: ModelConfig, *, is_tried: bool) -> Inspection:
    """Return what there is to know of the model at `path`, opened as `config` says. Raises what opening it raises.

    The vocabulary stays loaded: this process is not meant to do anything else.
    """
    with ThreadPoolExecutor(1) as other_core:
        loading = other_core.submit(_load_vocabulary, path) if is_tried else None
        gguf = read_gguf(path)
        metadata = outline_metadata(gguf)
        with Stubs(gguf.shards, outline_heads(gguf)) as stubs:
            with LlamaModel(stubs.paths, metadata=metadata, mode="sized", path=path) as sized:
                check_decoder_only(gguf, sized.has_encoder, sized.has_decoder)
                shape = context_shape(config, sized.trained_context_tokens, threads=1)
                sizes = _sizes(sized, shape)
            with LlamaModel(stubs.paths, stubs.cut, metadata, path=path) as model:
                address_space = AddressSpace(stubs.spans())
                address_space.reserve()
                narrow, kv_bytes = _map_narrow_pass(gguf, model, shape)
                if loading:
                    address_space.map_zeros()
                    _try(gguf, model, shape, narrow.graph)
                vocabulary = loading.result() if loading else _estimate_vocabulary(gguf)
                _libc.trim_heap()
                program_bytes = process_memory().taken_bytes - kv_bytes + vocabulary.unloaded_bytes
    return Inspection(
        is_tried=is_tried,
        context_tokens=sizes.context_tokens,
        trained_context_tokens=sized.trained_context_tokens,
        micro_batch_tokens=shape.micro_batch_tokens,
        vocabulary=vocabulary.tokens,
        load_s=vocabulary.load_s,
        program_bytes=program_bytes,
        kv_bytes=sizes.kv_bytes,
        buffer_bytes=sizes.buffer_bytes,
        cell_bytes=sizes.cell_bytes,
        cell_rows=_cell_rows(narrow.flow.cells, sizes.cell_layers, shape.n_streams),
        cell_uses=cell_uses(narrow.graph, narrow.flow),
        window_tokens=sized.sliding_window_tokens,
        windowed_share=_windowed_share(sizes.cell_layers),
        narrow_bytes=narrow.touched_bytes,
        spans=tuple(map(_in_files, address_space.spans)),
        packed_graph=pack_graph(_at_file_addresses(narrow.graph, address_space)),
    )


class _Vocabulary(NamedTuple):
    """What a vocabulary takes. unloaded_bytes: what this process does not hold yet."""

    tokens: int
    load_s: float
    unloaded_bytes: int
    model: LlamaModel | None = None


def _load_vocabulary(path: Path) -> _Vocabulary:
    started = time.monotonic()
    model = LlamaModel([path], mode="vocabulary")
    load_s = time.monotonic() - started
    try_vocabulary(model)
    return _Vocabulary(model.vocabulary, load_s, 0, model)


def _estimate_vocabulary(gguf: GgufModel) -> _Vocabulary:
    tokens, merges = (
        value.count if isinstance(value := gguf.metadata.get(f"tokenizer.ggml.{name}"), ArrayValue) else 0
        for name in ("tokens", "merges")
    )
    load_s, held_bytes = tokens * TOKEN_S + merges * MERGE_S, tokens * TOKEN_BYTES + merges * MERGE_BYTES
    return _Vocabulary(tokens, load_s, held_bytes)


class _Sizes(NamedTuple):
    """What a context will take. cell_layers: as of `LlamaContext`."""

    context_tokens: int
    kv_bytes: int
    buffer_bytes: int
    cell_bytes: int
    cell_layers: Sequence[tuple[int, int]]


def _sizes(model: LlamaModel, shape: ContextShape) -> _Sizes:
    """Return what a context of `shape` will take; of one that is very long, from what two shorter ones would."""
    if shape.context_tokens <= LONG_CONTEXT_TOKENS:
        context = LlamaContext(model, shape)
        context.close()
        sizes = context.context_tokens, context.kv_bytes, context.buffer_bytes, context.cell_bytes
        return _Sizes(*sizes, context.cell_layers)
    width = min(shape.micro_batch_tokens, LONG_CONTEXT_TOKENS // 2)
    half, whole = (
        _sizes(model, replace(shape, context_tokens=tokens, micro_batch_tokens=width))
        for tokens in (LONG_CONTEXT_TOKENS // 2, LONG_CONTEXT_TOKENS)
    )
    steps = (shape.context_tokens - whole.context_tokens) / (whole.context_tokens - half.context_tokens)
    kv, buffers, cells = (round(b + (b - a) * steps) for a, b in zip(half[1:4], whole[1:4], strict=True))
    return _Sizes(shape.context_tokens, kv, buffers, cells, whole.cell_layers)


def _map_narrow_pass(gguf: GgufModel, model: LlamaModel, shape: ContextShape) -> tuple[NarrowPass, int]:
    """Return what narrow passes are like, and the bytes of the cache that was made for them."""
    driver = Driver()
    with _short_context(gguf, model, shape, driver, driver.callback) as (decoder, context):
        most = decoder.capabilities.micro_batch_tokens
        widest = PassShape(min(shape.narrow_tokens, most), min(shape.narrow_outputs, most))
        return map_narrow_pass(decoder, driver, widest), context.kv_bytes


def _windowed_share(cell_layers: Sequence[tuple[int, int]]) -> float:
    """Return in what share of the layers with cells there are fewer than in the others."""
    most, n_layers = max((cells for cells, _ in cell_layers), default=0), sum(number for _, number in cell_layers)
    return sum(number for cells, number in cell_layers if cells < most) / n_layers if n_layers else 0.0


def _cell_rows(
    tensors: Sequence[CellTensor], cell_layers: Sequence[tuple[int, int]], n_streams: int
) -> tuple[tuple[int, float, int], ...]:
    """Return of each tensor its rows, its share of what all take, and the cells of its ring (`_rings`)."""
    total, rings = sum(tensor.n_rows * tensor.row_bytes for tensor in tensors), _rings(len(tensors), cell_layers)
    parts = ((tensor.n_rows, tensor.n_rows * tensor.row_bytes / total) for tensor in tensors)
    return tuple((*part, n_streams * ring) for part, ring in zip(parts, rings, strict=True))


def _rings(n_tensors: int, cell_layers: Sequence[tuple[int, int]]) -> list[int]:
    """Return of each tensor how many cells the ring of a sliding window has there; 0 where it is for the whole context.

    The mapped context is so short that a ring has as many cells as the others, and `cell_layers`, those of the whole
    one, do not say which layers have a ring. These are taken to be spread evenly, each group of them with a layer for
    the whole context behind it, as in most models. Where there are caches of other kinds, no layer is said to have one.
    """
    most, n_layers = max((cells for cells, _ in cell_layers), default=0), sum(number for _, number in cell_layers)
    fewer = {cells for cells, number in cell_layers if number and cells < most}
    if len(fewer) != 1 or n_tensors % n_layers:
        return [0] * n_tensors
    (ring,), n_whole = fewer, sum(number for cells, number in cell_layers if cells == most)
    layers = (number * n_layers // n_tensors for number in range(n_tensors))
    return [0 if (i + 1) * n_whole // n_layers > i * n_whole // n_layers else ring for i in layers]


def _try(gguf: GgufModel, model: LlamaModel, shape: ContextShape, graph: GraphMap) -> None:
    """Compute a pass of one token on what is under the model's weights now, which must be zeros."""
    driver = Driver()
    trial = Trial(driver)
    with _short_context(gguf, model, shape, driver, trial.callback) as (decoder, _):
        trial.run(decoder, graph, {tensor.name: tensor.type_id for tensor in gguf.tensors})


@contextlib.contextmanager
def _short_context(
    gguf: GgufModel, model: LlamaModel, shape: ContextShape, driver: Driver, callback: Callable[[int, bool, int], bool]
) -> Iterator[tuple[LocalDecoder, LlamaContext]]:
    """A context that takes little memory, with as much of `shape` as decides what a pass of one token computes."""
    short = shape.shortened(SHORT_CONTEXT_TOKENS)
    if model.is_recurrent:  # the state of each text takes its memory at once; of one or of several texts it may differ
        short = replace(short, sequences=min(short.sequences, 2))
    small = short
    with contextlib.suppress(ConfigError):  # raised where the model cannot have the smallest cache
        check_kv_types(gguf, ModelConfig(kv_type=SMALL_KV_TYPE, flash_attention=shape.flash_attention))
        os.environ["LLAMA_ATTN_ROT_DISABLE"] = "1"  # of quantised caches only: it adds nodes
        small = replace(short, kv_type_k=SMALL_KV_TYPE, kv_type_v=SMALL_KV_TYPE)
    try:
        context = LlamaContext(model, small, callback)
    except KernelError:  # some architectures are without flash attention, which a small cache needs
        context = LlamaContext(model, short, callback)
    decoder = LocalDecoder(model, context, driver, short)
    try:
        yield decoder, context
    finally:
        decoder.close()
        context.close()


def _in_files(span: MappedSpan) -> MappedSpan:
    """Return `span` at its file addresses, as if the file itself were mapped: in whole pages."""
    start, stop = round_down(span.start - span.base, _libc.PAGE), round_up(span.stop - span.base, _libc.PAGE)
    base = span.shard * SHARD_BYTES
    return MappedSpan(span.shard, base + start, base + stop, base)


def _at_file_addresses(graph: GraphMap, address_space: AddressSpace) -> GraphMap:
    def moved(read: WeightRead) -> WeightRead:
        span = address_space.span_of(read.address)
        return replace(read, address=span.shard * SHARD_BYTES + read.address - span.base)

    return tuple(replace(node, reads=tuple(map(moved, node.reads))) if node.reads else node for node in graph)
