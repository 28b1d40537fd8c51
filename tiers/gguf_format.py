"""The GGUF container as bytes: its constants, ggml's tensor types, and a cursor over one file's header.

The layout is that of ggml's `gguf.h`: magic, version, two counts, then metadata entries, tensor descriptions, padding
and tensor data, little-endian throughout. What the entries mean is the business of `tiers/gguf_header.py`.
"""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edge_run.base.errors import ModelFileError, TierReadError, reason_of

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4
MAX_TENSOR_NAME_BYTES = 63
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 64 << 20  # a chat template takes some KB; beyond this a length is a broken header
MAX_TEXT_BYTES = 96 << 20  # of all strings of a header together that are kept
MAX_ARRAY_STRINGS = 1 << 22  # of all arrays together; the largest vocabularies have a quarter of a million
MAX_HEADER_BYTES = 256 << 20  # llama.cpp gets a copy in memory; the largest vocabularies take 20 MB
MAX_ALIGNMENT_BYTES = 1 << 20  # the copy is padded to it; 32 is usual
MAX_ENTRIES = 1 << 16  # metadata entries and tensors; the largest models have some hundreds, and a few thousands
WINDOW_BYTES = 1 << 20
SHORT_STRINGS = 500
FETCH_AGAIN = "copy or download the file again"

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8

SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    UINT32: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    UINT64: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
WHOLE_NUMBERS = (0, 1, 2, 3, UINT32, 5, UINT64, 11)  # of these


@dataclass(frozen=True, slots=True)
class TensorType:
    """How one ggml type is stored: `block_elements` numbers in every `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    def size_bytes(self, elements: int) -> int:
        """Return the bytes that `elements` numbers take; `elements` is a multiple of the block."""
        return elements // self.block_elements * self.block_bytes


TENSOR_TYPES = {
    F32: TensorType("F32", 1, 4),
    F16: TensorType("F16", 1, 2),
    Q4_0: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    Q8_0: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}


def _short_strings(count: int, longest_bytes: int) -> re.Pattern[bytes]:
    """Return a pattern for `count` strings in a row, none of them empty or longer than `longest_bytes`."""
    lengths = (struct.pack("<Q", length) for length in range(1, longest_bytes + 1))
    one = b"|".join(re.escape(length) + b".{%d}" % length[0] for length in lengths)
    return re.compile(b"(?s:%s){%d}" % (one, count))


_SHORT_STRINGS = _short_strings(SHORT_STRINGS, 31)


def broken_header(path: Path, finding: str, **figures: int) -> ModelFileError:
    """Return the error for a header that no program writes.

    finding: where the header is broken, what was found there, and what is needed.
    """
    return ModelFileError(f"{path}: broken header: {finding}; {FETCH_AGAIN}", **figures)


class HeaderCursor:
    """Reads one header front to back through a window of `WINDOW_BYTES`, however long the header is. Not thread-safe.

    Every read is first checked against the file's size, and against the most that a header may have: a sparse file can
    be as large as it likes. So a broken count costs neither memory nor time. In all methods `what` names the item being
    read, for the error message.
    """

    __slots__ = ("_at", "_file", "_strings_left", "_text_bytes_left", "_window", "_window_start", "path", "size_bytes")

    def __init__(self, file: io.RawIOBase, path: Path, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self._text_bytes_left, self._strings_left = MAX_TEXT_BYTES, MAX_ARRAY_STRINGS
        self._file, self._window, self._window_start, self._at = file, b"", 0, 0

    @property
    def position(self) -> int:
        """The offset in the file of the next byte to be read."""
        return self._window_start + self._at

    def take(self, size_bytes: int, what: str) -> bytes:
        """Return the next `size_bytes` bytes."""
        self._ensure(size_bytes, what)
        start, self._at = self._at, self._at + size_bytes
        return self._window[start : self._at]

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """Return the next values; `layout` is that of `struct`."""
        self._ensure(layout.size, what)
        values = layout.unpack_from(self._window, self._at)
        self._at += layout.size
        return values

    def scalar(self, type_id: int, what: str) -> int | float | bool:
        """Return the next value of the scalar type `type_id`, a key of `SCALARS`."""
        number: int | float | bool = self.unpack(SCALARS[type_id], what)[0]
        return number

    def unsigned32(self, what: str) -> int:
        """Return the next unsigned 32-bit integer."""
        return int(self.scalar(UINT32, what))

    def unsigned64(self, what: str) -> int:
        """Return the next unsigned 64-bit integer."""
        return int(self.scalar(UINT64, what))

    def text(self, what: str, max_bytes: int = MAX_STRING_BYTES, *, is_strict: bool = True) -> str:
        """Return the next string. Bytes that are no UTF-8 are refused, or replaced by U+FFFD unless `is_strict`."""
        length_bytes = self.unsigned64(f"the length of {what}")
        self._check_room(length_bytes, what)
        if length_bytes > max_bytes:
            finding = f"{what} claims {length_bytes:,} bytes, at most {max_bytes:,} make sense"
            raise broken_header(self.path, finding, found_bytes=length_bytes, needed_bytes=max_bytes)
        self._text_bytes_left -= length_bytes
        if self._text_bytes_left < 0:
            finding = f"its strings up to {what} have more than {MAX_TEXT_BYTES:,} bytes"
            raise broken_header(self.path, finding, needed_bytes=MAX_TEXT_BYTES)
        start = self.position
        try:
            return self.take(length_bytes, what).decode("utf-8", "strict" if is_strict else "replace")
        except UnicodeDecodeError:
            finding = f"{what} at byte {start:,} is not UTF-8"
            raise broken_header(self.path, finding, position_bytes=start) from None

    def skip(self, size_bytes: int, what: str) -> None:
        """Move past `size_bytes` bytes without reading those outside the window."""
        self._check_room(size_bytes, what)
        self._at += size_bytes

    def skip_strings(self, count: int, what: str) -> None:
        """Move past `count` strings, such as a vocabulary of 100,000 tokens.

        A regular expression skips many short strings at a time, which takes 0.04 us for each; longer ones take 0.1 us.
        """
        if count > MAX_ARRAY_STRINGS:
            finding = f"{what} claims {count:,} strings, at most {MAX_ARRAY_STRINGS:,} make sense"
            raise broken_header(self.path, finding, found=count, needed=MAX_ARRAY_STRINGS)
        self._strings_left -= count
        if self._strings_left < 0:
            finding = f"its arrays up to {what} have more than {MAX_ARRAY_STRINGS:,} strings"
            raise broken_header(self.path, finding, needed=MAX_ARRAY_STRINGS)
        self._check_room(count * 8, what)
        unpack_length = SCALARS[UINT64].unpack_from
        left = count
        while left:
            self._ensure(8, what)
            window, at = self._window, self._at
            while left >= SHORT_STRINGS and (match := _SHORT_STRINGS.match(window, at)):
                at, left = match.end(), left - SHORT_STRINGS
            try:
                for _ in range(min(left, SHORT_STRINGS)):
                    at += 8 + unpack_length(window, at)[0]
                    left -= 1
            except (struct.error, OverflowError):  # the next length lies beyond the window, or beyond any file
                pass
            self.skip(at - self._at, what)

    def _ensure(self, size_bytes: int, what: str) -> None:
        """Read ahead until the window holds the next `size_bytes` bytes."""
        if self._at + size_bytes <= len(self._window):
            return
        self._check_room(size_bytes, what)
        position = self.position
        wanted_bytes = min(max(size_bytes, WINDOW_BYTES), self.size_bytes - position)
        try:
            self._file.seek(position)
            window = b""
            while len(window) < size_bytes and (piece := self._file.read(wanted_bytes - len(window))):
                window += piece
        except OSError as error:
            raise TierReadError(
                f"{self.path}: reading {wanted_bytes:,} bytes at {position:,} failed: {reason_of(error)}; "
                "check the disk",
                position_bytes=position,
                needed_bytes=wanted_bytes,
            ) from error
        self._window, self._window_start, self._at = window, position, 0
        if len(window) < size_bytes:
            self._truncated(position + size_bytes, position + len(window), what)

    def _check_room(self, size_bytes: int, what: str) -> None:
        if self.position + size_bytes > self.size_bytes:
            self._truncated(self.position + size_bytes, self.size_bytes, what)

    def _truncated(self, needed_bytes: int, found_bytes: int, what: str) -> NoReturn:
        raise ModelFileError(
            f"{self.path}: truncated or broken header: {what} ends at byte {needed_bytes:,}, the file has "
            f"{found_bytes:,}; {FETCH_AGAIN}",
            found_bytes=found_bytes,
            needed_bytes=needed_bytes,
        )
