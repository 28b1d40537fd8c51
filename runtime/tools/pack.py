"""Makes a packed file (`tiers/packed_file.py`) of a model: of experts, where they become smaller by it.

A model without experts has its weights repacked instead (`runtime/tools/pack_repacked.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edge_run.base.errors import NotSupported, option, system_errors
from edge_run.base.extras import PACK, need
from edge_run.base.files.whole import check_room
from edge_run.base.units import format_size
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.target_file import TargetFile, check_target, opened, read_at, written
from edge_run.runtime.graph.repackable import kind_of
from edge_run.runtime.planning.experts import CHUNKS_PER_PIECE
from edge_run.runtime.tools.pack_repacked import worth_repacking, write_repacked
from edge_run.tiers._libc import forget_pages
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import TensorInfo
from edge_run.tiers.packed import set_apart
from edge_run.tiers.packed_file import HEAD, Block, blocks_of, model_key, packed_path, write_head, write_index
from edge_run.tiers.packed_index import ENTRY, LARGEST_BLOCK_BYTES, SMALLEST_BLOCK_BYTES, Facts

MOST_SHARE = 0.95  # of its size that a tensor must come down to: less gained is not worth unpacking it
LEVEL = 1  # higher ones find nothing more in weights
SAMPLES = 4  # blocks of each tensor
_BLOCKS_AT_ONCE = 32
_SPARE_SHARE = 1.02  # of the size that samples predict

Compress = Callable[[bytes], bytes]
Frames = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed file that was written.

    path: the file; where the target is a link, what that leads to. size_bytes: of the file.
    raw_bytes, packed_bytes: of all blocks, before and after. tensors: so many are packed. left_out: types of number
    that are not, and the least share of their size that a sample of them came down to.
    repacked: the kinds of weights that it holds repacked; empty for packed experts.
    """

    path: Path
    size_bytes: int
    raw_bytes: int
    packed_bytes: int
    tensors: int
    left_out: dict[str, float]
    repacked: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """What is packed has this share of its size."""
        return self.packed_bytes / self.raw_bytes


@system_errors("packing")
def pack(
    model: str | Path,
    target: str | Path | None = None,
    *,
    is_overwritten: bool = False,
    cache_folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write the packed file of the model at `model` to `target`, by default beside it, where runs look for it.

    Args:
        model: a GGUF file, of a split one the first shard. It stays as it is, and is still needed.
        target: appears whole or not at all. Its folder exists.
        is_overwritten: a `target` that exists is replaced.
        cache_folder: where it is known which weights are faster repacked, as in `ModelConfig`.
        progress: called after each block with the bytes packed and the bytes in all.

    Raises NotSupported for a model whose experts do not become smaller, for one without experts and without weights
    that are worth repacking here, and for experts without zstandard; ConfigError for a target that exists, is the model
    itself or has no folder; ModelFileError for a model that is broken or changes meanwhile; TierReadError when the disk
    is too small or fails. Any exception, also one that `progress` raises and Ctrl-C, leaves no file behind.
    """
    gguf = read_gguf(Path(model))
    wanted = Path(target) if target else packed_path(gguf.shards[0].path)
    target = check_target(wanted, [shard.path for shard in gguf.shards], "the model itself", is_overwritten)
    tensors = _expert_tensors(gguf)
    if not tensors:
        return _pack_repacked(gguf, target, cache_folder, progress, is_overwritten=is_overwritten)
    compress = _compressor()
    block_bytes = _block_bytes(tensors)
    shares = {tensor: _sampled_share(gguf, tensor, block_bytes, compress) for tensor in tensors}
    chosen = _alike([tensor for tensor in tensors if shares[tensor] <= MOST_SHARE])
    left_out = _best_by_type({tensor: share for tensor, share in shares.items() if tensor not in chosen})
    if not chosen:
        found = ", ".join(f"{name} to {share:.0%}" for name, share in left_out.items())
        raise NotSupported(
            f"{model}: experts would come down to {found} of their size, which does not pay for unpacking them (at "
            f"most {MOST_SHARE:.0%} does); run it as it is",
        )
    needed_bytes = int(sum(shares[tensor] * tensor.size_bytes for tensor in chosen) * _SPARE_SHARE)
    check_room(target, needed_bytes, f"another folder ({option('target')})")
    size = f"some {format_size(needed_bytes)}"
    with written(target, needed_bytes, size, gguf.shards[0].path, is_replacing=is_overwritten) as file:
        raw_bytes, packed_bytes = _write(file, gguf, chosen, block_bytes, compress, progress)
    return Packed(target, target.stat().st_size, raw_bytes, packed_bytes, len(chosen), left_out)


def _pack_repacked(
    gguf: GgufModel,
    target: Path,
    cache_folder: str | Path | None,
    progress: Callable[[int, int], None] | None,
    *,
    is_overwritten: bool,
) -> Packed:
    tensors = worth_repacking(gguf, cache_folder)
    needed_bytes = sum(tensor.size_bytes + 2 * LARGEST_BLOCK_BYTES for tensor in tensors)
    check_room(target, needed_bytes, f"another folder ({option('target')})")
    size = f"some {format_size(needed_bytes)}"
    with written(target, needed_bytes, size, gguf.shards[0].path, is_replacing=is_overwritten) as file:
        raw_bytes = write_repacked(file, gguf, tensors, blocks_of(tensors, LARGEST_BLOCK_BYTES), progress)
    kinds = sorted({kind_of(tensor, by_expert=False) for tensor in tensors})
    return Packed(target, target.stat().st_size, raw_bytes, raw_bytes, len(tensors), {}, tuple(kinds))


def _compressor() -> Compress:
    """Return what compresses a block, of which several may be at once."""
    zstandard = need("zstandard", PACK)

    def compress(block: bytes) -> bytes:
        return bytes(zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(block))

    return compress


def _expert_tensors(gguf: GgufModel) -> list[TensorInfo]:
    """Return the tensors that hold one expert after the other; a file may say that there are none in it."""
    n_experts = gguf.value("expert_count")
    return [one for one in gguf.tensors if len(one.shape) == 3 and one.shape[2] == n_experts and one.size_bytes]


def _number_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Return by how many bytes those of numbers are set apart: 2; or 1, which is not, where not all have 16 bits."""
    types = [TENSOR_TYPES[tensor.type_id] for tensor in tensors]
    return 2 if all((kind.block_elements, kind.block_bytes) == (1, 2) for kind in types) else 1


def _alike(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """Return those of `tensors` whose numbers are set apart in the same way: of two kinds the one with more bytes."""
    kinds: dict[int, list[TensorInfo]] = {}
    for tensor in tensors:
        kinds.setdefault(_number_bytes([tensor]), []).append(tensor)
    return max(kinds.values(), key=lambda some: sum(tensor.size_bytes for tensor in some), default=[])


def _best_by_type(shares: Mapping[TensorInfo, float]) -> dict[str, float]:
    """Return the least share of any tensor of each type, by the type's name."""
    best: dict[str, float] = {}
    for tensor, share in shares.items():
        name = TENSOR_TYPES[tensor.type_id].name
        best[name] = min(share, best.get(name, 1.0))
    return best


def _block_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Return the size of a block: small against an expert's piece, as what is read of one begins and ends anywhere."""
    piece_bytes = min(tensor.size_bytes // tensor.shape[2] for tensor in tensors)
    size = LARGEST_BLOCK_BYTES
    while size > SMALLEST_BLOCK_BYTES and size > piece_bytes // CHUNKS_PER_PIECE:
        size //= 2
    return size


def _sampled_share(gguf: GgufModel, tensor: TensorInfo, block_bytes: int, compress: Compress) -> float:
    """Return what some blocks of `tensor` have of their size, compressed."""
    length = min(block_bytes, tensor.size_bytes)
    starts = [tensor.offset + i * (tensor.size_bytes - length) // SAMPLES for i in range(SAMPLES)]
    with opened(gguf.shards[tensor.shard].path) as file:
        blocks = [read_at(file, start // 32 * 32, length) for start in starts]
    number_bytes = _number_bytes([tensor])
    return sum(len(part) for block in blocks for part in _frames(block, number_bytes, compress)) / sum(map(len, blocks))


def _write(
    file: TargetFile,
    gguf: GgufModel,
    tensors: Sequence[TensorInfo],
    block_bytes: int,
    compress: Compress,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Write a packed file of `tensors`; return the bytes of its blocks before and after."""
    number_bytes = _number_bytes(tensors)
    blocks = blocks_of(tensors, block_bytes)
    all_bytes, raw_bytes, table = len(blocks) * block_bytes, 0, bytearray()
    with ThreadPoolExecutor(compute_threads(None)) as workers:
        file.write(bytes(HEAD.size))
        for some, raw in _read_blocks(gguf, blocks, block_bytes):
            raw_bytes += sum(map(len, raw))
            frames = workers.map(lambda block: _frames(block, number_bytes, compress), raw)
            for (shard, number), (last, first) in zip(some, frames, strict=True):
                table += ENTRY.pack(shard, number, file.tell(), len(last), len(first))
                file.write(last + first)
            if progress:
                progress(min(raw_bytes, all_bytes), all_bytes)
        names = tuple(tensor.name for tensor in tensors)
        start = file.tell()
        key = model_key(gguf, names)
        gguf.check_unchanged()  # since its header was read: blocks and key are of the same files
        index = write_index(Facts(key, block_bytes, number_bytes, names, raw_bytes, start - HEAD.size))
        file.write(index + table)
        file.seek(0)
        file.write(write_head(start, index, bytes(table)))
    return raw_bytes, start - HEAD.size


def _frames(block: bytes, number_bytes: int, compress: Compress) -> Frames:
    """Return the two frames of a block, of which the second may be empty."""
    last, first = set_apart(block, number_bytes)
    return compress(last), compress(first) if number_bytes == 2 else b""


def _read_blocks(
    gguf: GgufModel, blocks: Sequence[Block], block_bytes: int
) -> Iterator[tuple[list[Block], list[bytes]]]:
    """Yield some blocks at a time, and what the model's files have there; the page cache keeps none of it."""
    for number, shard in enumerate(gguf.shards):
        rest = iter([block for block in blocks if block[0] == number])
        with opened(shard.path) as file:
            while some := list(islice(rest, _BLOCKS_AT_ONCE)):
                lengths = [min(block_bytes, shard.size_bytes - block * block_bytes) for _, block in some]
                raw = [read_at(file, block * block_bytes, n) for (_, block), n in zip(some, lengths, strict=True)]
                first, last = some[0][1], some[-1][1]
                forget_pages(file.fileno(), first * block_bytes, (last + 1 - first) * block_bytes)
                yield some, raw
