"""Symbols to bytes and back: a range coder with static tables (`constriction`), or zstd where that is missing.

A table is one channel's prior: the frequencies of consecutive symbols. Both sides must have equal tables.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ProtocolError
from edge_run.base.extras import SPLIT, need

RANGE, ZSTD = 0, 1  # which coder made a payload
FREQUENCY_TOTAL = 1 << 16  # small enough that every share of it is exact in single precision
FARTHEST_SYMBOL = (1 << 15) - 1  # from 0: symbols are kept in 16 bits
MOST_TRIMMED_BYTES = 5
_WORD, _WORD_BYTES = ">u4", 4  # big endian, so that the least significant bytes are last


@dataclass(frozen=True, slots=True)
class FrequencyTable:
    """The prior of one channel.

    below: how far its smallest symbol lies below 0.
    frequencies: the frequencies of that symbol and the following ones, all above 0.
    """

    below: int
    frequencies: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.frequencies or min(self.frequencies) < 1 or sum(self.frequencies) > 2 * FREQUENCY_TOTAL:
            raise ValueError("a table of no, of impossible or of too large frequencies")
        if not -FARTHEST_SYMBOL <= self.low <= self.high <= FARTHEST_SYMBOL:
            raise ValueError(f"a table of symbols from {self.low} to {self.high}, which cannot be")

    @property
    def low(self) -> int:
        """The smallest symbol."""
        return -self.below

    @property
    def high(self) -> int:
        """The largest symbol."""
        return self.low + len(self.frequencies) - 1

    @property
    def shares(self) -> NDArray[np.float32]:
        """The probability of each symbol."""
        return (np.array(self.frequencies) / sum(self.frequencies)).astype(np.float32)

    @property
    def entropy_bits(self) -> float:
        """The mean bits of a symbol, if symbols are as frequent as this prior says."""
        shares = self.shares.astype(np.float64)
        return float(-(shares * np.log2(shares)).sum())

    def bits(self, symbols: NDArray[np.int32]) -> float:
        """Return the fewest bits that `symbols` can take with this prior."""
        return float(-np.log2(self.shares.astype(np.float64))[symbols - self.low].sum())


def fit_table(symbols: NDArray[np.int32]) -> FrequencyTable:
    """Return a prior counted on `symbols`; it also has 0, and one symbol more at either end."""
    low, high = min(int(symbols.min()) - 1, 0), max(int(symbols.max()) + 1, 0)
    counts = np.bincount((symbols - low).ravel(), minlength=high - low + 1) + 0.5
    shares = counts / counts.sum() * (FREQUENCY_TOTAL - len(counts))
    return FrequencyTable(-low, tuple(int(one) + 1 for one in shares))


def best_coder() -> int:
    """Return the best coder that is installed: the range coder, or zstd without `constriction`."""
    return RANGE if importlib.util.find_spec("constriction") else ZSTD


class EntropyCoder:
    """Codes rows of symbols, one row for each table, and reuses the coder's models. Thread-safe."""

    def __init__(self, tables: Sequence[FrequencyTable]) -> None:
        self._tables = tuple(tables)
        self._models: list[Any] | None = None
        self._dtype = np.dtype(np.int8 if all(t.low >= -128 and t.high < 128 for t in tables) else np.int16)
        self.lows = np.array([table.low for table in tables], dtype=np.int32)[:, None]
        self.highs = np.array([table.high for table in tables], dtype=np.int32)[:, None]

    def encode(self, symbols: NDArray[np.int32], coder: int) -> bytes:
        """Return `symbols` (rows, columns) as bytes; each symbol must be in its row's table."""
        if coder == ZSTD:
            return bytes(
                need("zstandard", SPLIT).ZstdCompressor(level=19).compress(symbols.astype(self._dtype).tobytes())
            )
        encoder = need("constriction", SPLIT).stream.queue.RangeEncoder()
        for row, table, model in zip(symbols, self._tables, self._range_models(), strict=True):
            encoder.encode(row - np.int32(table.low), model)
        return self._trimmed(encoder.get_compressed().astype(_WORD).tobytes(), symbols)

    def decode(self, payload: bytes, columns: int, coder: int) -> NDArray[np.int32]:
        """Return the symbols (rows, columns) in `payload`. Raises ProtocolError where there cannot be so many."""
        symbols = self._unpacked(payload, columns) if coder == ZSTD else self._decoded(payload, columns)
        if np.any(symbols < self.lows) or np.any(symbols > self.highs):
            raise ProtocolError("code: symbols that its prior does not have; it is damaged, or made for another prior")
        return symbols

    def bits(self, symbols: NDArray[np.int32]) -> float:
        """Return the fewest bits that `symbols` can take with these tables, which is their cross entropy."""
        return sum(table.bits(row) for row, table in zip(symbols, self._tables, strict=True))

    def _range_models(self) -> list[Any]:
        if self._models is None:
            categorical = need("constriction", SPLIT).stream.model.Categorical
            self._models = [categorical(table.shares, perfect=False) for table in self._tables]
        return self._models

    def _decoded(self, payload: bytes, columns: int) -> NDArray[np.int32]:
        padded = payload + bytes(-len(payload) % _WORD_BYTES)
        words = np.frombuffer(padded, dtype=_WORD).astype(np.uint32)
        decoder = need("constriction", SPLIT).stream.queue.RangeDecoder(words)
        rows = []
        try:
            for table, model in zip(self._tables, self._range_models(), strict=True):
                rows.append(decoder.decode(model, columns) + np.int32(table.low))
        except Exception as error:  # an AssertionError, by the coder's own account of itself
            raise ProtocolError(f"code: the range coder cannot read its {len(payload)} bytes ({error})") from error
        return np.stack(rows).astype(np.int32)

    def _trimmed(self, payload: bytes, symbols: NDArray[np.int32]) -> bytes:
        """Return the shortest prefix of `payload` that decodes to `symbols` when zeros follow; it may be one higher.

        A range coder may end at any number of an interval. This coder ends on whole words, and four bytes are a lot in
        a code of 100 bytes. Each attempt takes about 50 us.
        """
        for kept in range(max(len(payload) - MOST_TRIMMED_BYTES, 0), len(payload)):
            number = int.from_bytes(payload[:kept], "big")
            for shorter in (number, number + 1):
                if shorter < 1 << 8 * kept and self._gives(candidate := shorter.to_bytes(kept, "big"), symbols):
                    return candidate
        return payload

    def _gives(self, payload: bytes, symbols: NDArray[np.int32]) -> bool:
        try:
            return np.array_equal(self._decoded(payload, symbols.shape[1]), symbols)
        except ProtocolError:
            return False

    def _unpacked(self, payload: bytes, columns: int) -> NDArray[np.int32]:
        zstandard = need("zstandard", SPLIT)
        wanted = len(self._tables) * columns * self._dtype.itemsize
        try:
            found = zstandard.get_frame_parameters(payload).content_size
            if found != wanted:  # before anything of that size is allocated
                raise ProtocolError(f"code: {found} bytes when unpacked, needed are {wanted}; it is damaged or foreign")
            data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=wanted)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"code: zstd cannot read its {len(payload)} bytes ({error})") from error
        return np.frombuffer(data, dtype=self._dtype).reshape(len(self._tables), columns).astype(np.int32)
