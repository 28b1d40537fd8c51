"""Activations that cross a slow link in fewer bytes: exact in six sevenths, or nearly exact in a quarter.

*Packed* (`pack_floats`) is exact: of float32 numbers the exponents repeat, the rest is noise. So the exponents go
together through zstd, and signs and mantissas as they are.

    numbers (u32) | bytes of packed exponents (u32) | zstd of exponents (u8) | signs and mantissas, three planes of u8

*Compact* (`encode_activations`) has 8 bits a value in blocks of 64, what sticks out in float16, then zstd.

    magic (4) | rows, columns, outliers (u32) | zstd of: scales f16, values i8, places of outliers u32, outliers f16

An activation's channels are uneven: a few are hundreds of times larger than the rest, and would take all of a block's
255 steps (Dettmers et al., 2022, LLM.int8, section 3). They are found by the median of their block and sent apart. What
comes back is near, not equal, so tokens may differ: nobody uses this who did not ask for it, and `is_worthwhile` says
where it saves time.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from edge_run.base.errors import ProtocolError
from edge_run.base.extras import MESH, need

if TYPE_CHECKING:
    import numpy.typing as npt

    Activations = npt.NDArray[np.float32]

BLOCK = 64
OUTLIER_RATIO = 12.0  # of the median of a block's magnitudes: of a normal distribution, hardly any are beyond
MOST_VALUES = 16 << 20  # 64 MiB, as much as a part of a message may have
STEPS, MOST_F16 = 127, 65504.0
_HEAD = struct.Struct("<4sIII")
_MAGIC = b"ERS1"
_PACKED = struct.Struct("<II")


def pack_floats(floats: memoryview) -> bytes:
    """Return float32 numbers, given as bytes, in fewer bytes; `unpack_floats` gives the same bits back."""
    bits = np.frombuffer(floats, "<u4")
    planes = ((bits << 1) | (bits >> 31)).view(np.uint8).reshape(-1, 4)  # the exponent becomes a byte of its own
    exponents: bytes = need("zstandard", MESH).ZstdCompressor(level=1).compress(planes[:, 3].tobytes())
    return _PACKED.pack(len(bits), len(exponents)) + exponents + planes[:, :3].tobytes()


def packed_bytes(code: bytes | memoryview) -> int:
    """Return how many bytes `unpack_floats` makes of a code. Raises ProtocolError for what cannot be one."""
    return 4 * _packed_head(code)[0]


def compact_bytes(code: bytes | memoryview) -> int:
    """Return how many bytes of numbers `decode_activations` makes of a code. Raises ProtocolError for what is none."""
    rows, columns, _ = _compact_head(code)
    return 4 * rows * columns


def unpack_floats(code: bytes | memoryview) -> memoryview:
    """Return the bytes of the numbers of a code. Raises ProtocolError where it is none, before it takes memory."""
    size, packed = _packed_head(code)
    planes = np.empty((size, 4), np.uint8)
    planes[:, 3] = np.frombuffer(_unpacked(bytes(code[_PACKED.size : _PACKED.size + packed]), size), np.uint8)
    planes[:, :3] = np.frombuffer(code, np.uint8, 3 * size, _PACKED.size + packed).reshape(-1, 3)
    bits = planes.reshape(-1).view("<u4")
    return memoryview(((bits >> 1) | (bits << 31)).view(np.uint8).data).cast("B")


def encode_activations(activations: Activations) -> bytes:
    """Return `activations`, `(rows, columns)` in float32, in about a quarter of the bytes.

    Raises ProtocolError for what is not finite, too large for float16, or too much.
    """
    rows, columns = activations.shape
    size = rows * columns
    if size > MOST_VALUES or not np.isfinite(activations).all() or np.abs(activations).max(initial=0.0) > MOST_F16:
        raise ProtocolError(
            f"activations of {rows} x {columns}: too many, too large or not finite; send them as they are"
        )
    flat = np.zeros(-(-size // BLOCK) * BLOCK, np.float32)
    flat[:size] = activations.ravel()
    blocks = flat.reshape(-1, BLOCK)
    limits = OUTLIER_RATIO * np.median(np.abs(blocks), axis=1, keepdims=True)
    places = np.flatnonzero((np.abs(blocks) > limits) & (limits > 0)).astype("<u4")
    apart = flat[places].astype("<f2")
    flat[places] = 0.0
    scales = _rounded_up(np.abs(blocks).max(axis=1, initial=0.0) / STEPS)
    steps = scales.astype(np.float32)[:, None]
    values = np.rint(np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0)).astype(np.int8)
    content = b"".join(part.tobytes() for part in (scales, values, places, apart))
    packed: bytes = need("zstandard", MESH).ZstdCompressor(level=1).compress(content)
    return _HEAD.pack(_MAGIC, rows, columns, len(places)) + packed


def decode_activations(code: bytes | memoryview) -> Activations:
    """Return the activations of a code. Raises ProtocolError where it is none, before memory is taken."""
    rows, columns, outliers = _compact_head(code)
    size, blocks = rows * columns, -(-rows * columns // BLOCK)
    wanted_bytes = 2 * blocks + BLOCK * blocks + 6 * outliers
    content = _unpacked(bytes(code[_HEAD.size :]), wanted_bytes)
    scales = np.frombuffer(content, "<f2", blocks)
    values = np.frombuffer(content, np.int8, BLOCK * blocks, 2 * blocks)
    places = np.frombuffer(content, "<u4", outliers, (2 + BLOCK) * blocks)
    apart = np.frombuffer(content, "<f2", outliers, (2 + BLOCK) * blocks + 4 * outliers)
    with np.errstate(invalid="ignore", over="ignore"):  # scales that are not finite are found below
        flat = (values.reshape(-1, BLOCK) * scales.astype(np.float32)[:, None]).reshape(-1)
    if outliers and int(places.max()) >= size:
        raise ProtocolError("activations: an outlier outside of them")
    flat[places] = apart
    if not np.isfinite(flat).all():
        raise ProtocolError("activations: values that are not finite")
    return flat[:size].reshape(rows, columns)


def _packed_head(code: bytes | memoryview) -> tuple[int, int]:
    """Return how many numbers a code has, and the bytes of their exponents."""
    if len(code) < _PACKED.size:
        raise ProtocolError(f"activations: a code of {len(code)} bytes")
    size, packed = _PACKED.unpack_from(code)
    if size > MOST_VALUES or len(code) != _PACKED.size + packed + 3 * size:
        raise ProtocolError(f"activations: {size} numbers in a code of {len(code)} bytes, which cannot be")
    return size, packed


def _compact_head(code: bytes | memoryview) -> tuple[int, int, int]:
    """Return the rows, columns and outliers of a code."""
    if len(code) < _HEAD.size:
        raise ProtocolError(f"activations: a code of {len(code)} bytes")
    magic, rows, columns, outliers = _HEAD.unpack_from(code)
    if magic != _MAGIC or rows * columns > MOST_VALUES or outliers > rows * columns:
        raise ProtocolError(f"activations: {rows} x {columns} with {outliers} outliers, which cannot be")
    return rows, columns, outliers


def is_worthwhile(plain_bytes: int, coded_bytes: int, link_bytes_per_s: float, codec_bytes_per_s: float) -> bool:
    """Whether an activation arrives earlier in code: what the link saves is more than coding and decoding it takes."""
    saved_s = (plain_bytes - coded_bytes) / link_bytes_per_s
    return saved_s > plain_bytes / codec_bytes_per_s


def _unpacked(packed: bytes, wanted_bytes: int) -> bytes:
    """Return what was packed, which must be `wanted_bytes`. Raises ProtocolError."""
    zstandard = need("zstandard", MESH)
    try:
        claimed_bytes = zstandard.frame_content_size(packed)  # what zstandard would take memory for, whatever its limit
        if claimed_bytes != wanted_bytes:
            raise ProtocolError(f"activations: a code of {claimed_bytes} bytes, {wanted_bytes} were to come")
        content: bytes = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(packed)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"activations: a damaged code ({error})") from error
    if len(content) != wanted_bytes:
        raise ProtocolError(f"activations: {len(content)} bytes in a code of {wanted_bytes}")
    return content


def _rounded_up(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Return `values` in float16, none smaller, so that no quotient is beyond the steps."""
    near = values.astype("<f2")
    return np.where(near.astype(np.float32) < values, np.nextafter(near, np.float16(np.inf)), near).astype("<f2")
