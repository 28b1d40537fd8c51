"""The index of a packed file, trusted only where the packer would have written the same for the model beside it.

The index decides how much memory is written, and where. So every figure is checked before it is used: first its type
and range, then the blocks against the packed file and against the model's files.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_run.base.strict_json import parse
from edge_run.base.units import KIB, MIB
from edge_run.tiers.gguf import GgufModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LARGEST_BLOCK_BYTES, SMALLEST_BLOCK_BYTES = 256 * KIB, 64 * KIB
READ_BYTES = MIB  # of packed blocks in a row, in one read
PAGES_BYTES = tuple(KIB << power for power in range(2, 7))  # how wide pages are, on whichever machine
_MODEL = re.compile(r"[0-9a-f]{64}")
ENTRY = struct.Struct("<IIQII")  # of a block; its columns as NumPy reads them:
_COLUMNS = (("shard", "<u4"), ("number", "<u4"), ("start", "<u8"), ("first", "<u4"), ("second", "<u4"))
_MOST_SHARDS = 99_999  # their names have five digits


@dataclass(frozen=True, slots=True)
class Facts:
    """The JSON of an index; see `PackedFile`.

    layout: how the rows of the weights are interleaved; empty in a file of compressed experts.
    """

    model: str
    block_bytes: int
    number_bytes: int
    names: tuple[str, ...]
    raw_bytes: int
    packed_bytes: int
    layout: str = ""

    @property
    def is_repacked(self) -> bool:
        """Whether blocks are as they are to be in memory, with repacked weights; else they are compressed."""
        return bool(self.layout)


def decode_facts(text: bytes) -> Facts:
    """Decode the JSON `text`. Raises ValueError where the packer would not have written it so."""
    found = parse(text)
    if not isinstance(found, dict) or found.keys() != set(Facts.__slots__):
        raise ValueError("its index has other entries")
    names = found["names"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError("its index names no tensors")
    if len(set(names)) != len(names):
        raise ValueError("its index names a tensor twice")
    if not isinstance(found["model"], str) or not _MODEL.fullmatch(found["model"]):
        raise ValueError("its index names no model")
    figures = {key: found[key] for key in ("block_bytes", "number_bytes", "raw_bytes", "packed_bytes")}
    if any(type(figure) is not int or not 1 <= figure < 1 << 63 for figure in figures.values()):
        raise ValueError("its index has a figure that cannot be")
    block_bytes = found["block_bytes"]
    if not SMALLEST_BLOCK_BYTES <= block_bytes <= LARGEST_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise ValueError(f"its blocks cannot be of {block_bytes} bytes")
    if found["number_bytes"] not in (1, 2):
        raise ValueError(f"its numbers cannot be of {found['number_bytes']} bytes")
    layout = found["layout"]
    if not isinstance(layout, str) or (layout and (not _MODEL.fullmatch(layout) or found["number_bytes"] != 1)):
        raise ValueError("its weights lie in an order that cannot be")
    return Facts(found["model"], names=tuple(names), layout=layout, **figures)


def read_table(table: bytes) -> npt.NDArray[np.void]:
    """Return the table of blocks as an array: for each its shard, number in the shard, start, and two frame lengths."""
    import numpy as np

    return np.frombuffer(table, np.dtype(list(_COLUMNS)))


def alignment_of(table: bytes) -> int:
    """Return of how many bytes the pages are that blocks with repacked weights begin with and are padded to.

    Raises ValueError where the first one does not lie behind one such page.
    """
    start = int(ENTRY.unpack_from(table)[2]) if len(table) >= ENTRY.size else 0
    if start not in PAGES_BYTES:
        raise ValueError("its blocks do not begin with a page")
    return start


def check_table(facts: Facts, table: bytes, start: int, stop: int) -> None:
    """Raise ValueError unless the blocks of `table` fill the file from `start` to `stop` without gaps, in order."""
    import numpy as np

    if not table or len(table) % ENTRY.size:
        raise ValueError("its table is not one of blocks")
    blocks = read_table(table)
    if int(blocks["shard"].max()) > _MOST_SHARDS or (np.diff(_keys(blocks)) <= 0).any():
        raise ValueError("its blocks are not in order")
    lengths = blocks["first"].astype(np.int64) + blocks["second"]
    are_two = facts.number_bytes == 2
    if not blocks["first"].all() or ((blocks["second"] > 0) != are_two).any() or int(lengths.max()) > READ_BYTES:
        raise ValueError("a block has a length that cannot be")
    ends = start + np.cumsum(lengths)
    if int(ends[-1]) != stop or not np.array_equal(blocks["start"], ends - lengths):
        raise ValueError("its blocks are not one behind the other")
    if facts.packed_bytes != stop - start or facts.raw_bytes > len(blocks) * facts.block_bytes:
        raise ValueError("its blocks have another size together")


def check_blocks(facts: Facts, table: bytes, gguf: GgufModel) -> None:
    """Raise ValueError unless `table` has exactly the blocks of `gguf` that hold the tensors named in `facts`."""
    import numpy as np

    blocks, size, sizes = read_table(table), facts.block_bytes, [shard.size_bytes for shard in gguf.shards]
    packed = set(facts.names)
    places = [
        (tensor.shard << 32, tensor.offset // size, -(-(tensor.offset + tensor.size_bytes) // size))
        for tensor in gguf.tensors
        if tensor.name in packed
    ]
    n_most = len(blocks) + len(places)  # tensors share their first blocks only; a file with holes may have any number
    is_right = sum(stop - first for _, first, stop in places) <= n_most
    ranges = (shard + np.arange(first, stop) for shard, first, stop in places)
    if not is_right or not np.array_equal(np.unique(np.concatenate([[], *ranges])), _keys(blocks)):
        raise ValueError("its blocks are not those of its tensors")
    rest = np.array(sizes)[blocks["shard"]] - blocks["number"].astype(np.int64) * size
    lengths = np.minimum(rest, size)
    if facts.raw_bytes != int(lengths.sum()):
        raise ValueError("its blocks have another size unpacked")
    if facts.is_repacked:
        page_bytes = alignment_of(table)
        if not np.array_equal(blocks["first"], -(-lengths // page_bytes) * page_bytes):
            raise ValueError("its blocks are not as long as those of its model")


def _keys(blocks: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Return a number for each block that grows in file order."""
    import numpy as np

    keys: npt.NDArray[np.int64] = (blocks["shard"].astype(np.int64) << 32) + blocks["number"]
    return keys
