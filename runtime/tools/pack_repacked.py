"""Writes weights repacked into a packed file, so that readers need not repack them each time that they stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from edge_run.base.config import PACKED_OFF, WIDEST_MICRO_BATCH, ModelConfig
from edge_run.base.errors import NotSupported
from edge_run.base.units import round_up
from edge_run.devices.host.target_file import TargetFile
from edge_run.runtime.decoding.repacked_source import RepackedSource, RepackRooms
from edge_run.runtime.graph.repackable import described, repackable
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.repacking import RepackedWeight, Repacking, groups_of, layout_of
from edge_run.runtime.planning.prepare import prepare
from edge_run.runtime.planning.repack_choice import kinds_to_pack
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo
from edge_run.tiers.packed_file import ALIGNMENT_BYTES, Block, model_key, write_head, write_index
from edge_run.tiers.packed_index import ENTRY, LARGEST_BLOCK_BYTES, Facts
from edge_run.tiers.source import SourceFile


def worth_repacking(gguf: GgufModel, cache_folder: str | Path | None) -> list[TensorInfo]:
    """Return the weights of a model that have repacked kernels here, and are faster so where that was measured.

    cache_folder: where measurements are kept. Raises NotSupported where there are none.
    """
    config = ModelConfig(
        packed=PACKED_OFF, repack="off", micro_batch_tokens=WIDEST_MICRO_BATCH, cache_folder=cache_folder
    )
    known = prepare(gguf, config, is_opened=False).known
    assert known is not None, "a plan needs the graph"
    found = repackable(known.graph, gguf)
    able = groups_of(described(tensor for tensors in found.values() for tensor in tensors))
    wanted = kinds_to_pack(gguf, config)
    tensors = [
        tensor
        for kind, some in found.items()
        for tensor in some
        if kind in wanted and (tensor.type_id, tensor.shape, False) in able
    ]
    if not tensors:
        raise NotSupported(
            f"{gguf.shards[0].path}: has no experts, and none of its weights are faster repacked on this processor; "
            "run it as it is"
        )
    return sorted(tensors, key=lambda tensor: (tensor.shard, tensor.offset))


def write_repacked(
    file: TargetFile,
    gguf: GgufModel,
    tensors: Sequence[TensorInfo],
    blocks: Sequence[Block],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write a packed file of `tensors`, repacked, in `blocks` to `file`; return the bytes of the blocks."""
    names, layout = tuple(tensor.name for tensor in tensors), layout_of(described(tensors))
    facts = Facts(model_key(gguf, names), LARGEST_BLOCK_BYTES, 1, names, 1, 1, layout)
    raw_bytes, place, table = 0, ALIGNMENT_BYTES, bytearray()
    with _Repacked(gguf, tensors) as repacked:
        file.write(bytes(place))
        for shard, number in blocks:
            content = repacked.read(shard, number * LARGEST_BLOCK_BYTES)
            length = round_up(len(content), ALIGNMENT_BYTES)
            file.write(content)
            file.write(bytes(length - len(content)))
            table += ENTRY.pack(shard, number, place, length, 0)
            raw_bytes, place = raw_bytes + len(content), place + length
            if progress:
                progress(raw_bytes, len(blocks) * LARGEST_BLOCK_BYTES)
        gguf.check_unchanged()
        index = write_index(replace(facts, raw_bytes=raw_bytes, packed_bytes=place - ALIGNMENT_BYTES))
        file.write(index + table)
        file.seek(0)
        file.write(write_head(place, index, bytes(table)))
    return raw_bytes


class _Repacked(contextlib.ExitStack):
    """The shards of a model with `tensors` repacked, a block at a time. It must be entered, and closes then."""

    def __init__(self, gguf: GgufModel, tensors: Sequence[TensorInfo]) -> None:
        super().__init__()
        self._gguf, self._tensors = gguf, tensors

    def __enter__(self) -> _Repacked:
        repacking, weights = Repacking(), dict[int, list[tuple[int, RepackedWeight]]]()
        self.enter_context(ggml.log.listening(lambda line: None))  # a line for each slice that is repacked
        self.callback(repacking.close)
        for tensor in self._tensors:
            weight = repacking.describe(tensor.type_id, tensor.shape, by_expert=False)
            assert weight, f"no kernel for {tensor.name}"
            weights.setdefault(tensor.shard, []).append((tensor.offset, weight))
        rooms = RepackRooms(max(weight.group_bytes for some in weights.values() for _, weight in some))
        self.callback(rooms.close)
        files = [SourceFile(shard.path, shard.identity) for shard in self._gguf.shards]
        for file in files:
            self.callback(file.close)
        self._sources = [
            RepackedSource(file, sorted(weights.get(shard, ()), key=itemgetter(0)), rooms)
            for shard, file in enumerate(files)
        ]
        self._buffer = _libc.map_anonymous(LARGEST_BLOCK_BYTES)
        self.callback(_libc.unmap, self._buffer, LARGEST_BLOCK_BYTES)
        return self

    def read(self, shard: int, offset: int) -> memoryview:
        """Return the block from `offset` on, which is replaced by the next one."""
        source = self._sources[shard]
        length = min(LARGEST_BLOCK_BYTES, source.size_bytes - offset)
        source.read_into(self._buffer, round_up(length, _libc.PAGE), offset)
        return _libc.view(self._buffer, length)
