"""Codes tensors for the network: scaled, rounded, and entropy coded with a static prior for each channel.

A code is `header | payload`. Header, 7 bytes (9 from payloads of 255 bytes on):

    byte 0     version (3 bits), coder (1 bit), rate (4 bits)
    bytes 1-2  fingerprint of the model
    byte  3    fingerprint of the cut
    bytes 4-5  fingerprint of the prior
    byte  6    length of the payload; 255: it follows in two bytes, little endian

The same codec serves every tensor of (channels, positions): a bottleneck's latents, or the hidden states of a language
model, where a channel is an element of the embedding and a position a token (`fit_codec`).

Rates (gain vectors) are those of Cui et al., 2021; static priors per channel those of Balle et al., 2017. Here the
priors are counted, not parametric.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ProtocolError
from edge_run.partition.entropy_coding import EntropyCoder, FrequencyTable, best_coder, fit_table

VERSION = 1
MOST_RATES = 16
MOST_PAYLOAD_BYTES = 0xFFFF
LARGEST_SYMBOL = 2047  # beyond, values are clipped: a table is as long as its symbols are far apart
MOST_SCALE = 1.25  # of gains, after they were learnt
_BESIDE_ENTROPY_BYTES = 8.0  # of a code: its header, and the end of the range coder's
_HEADER = struct.Struct("<BHBHB")
_LONG = struct.Struct("<H")
_LENGTH_FOLLOWS = 0xFF


class CodeTooLong(ValueError):
    """A tensor whose code would be longer than one can be."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One setting of a codec.

    gains: the factor of each channel before rounding.
    tables: the prior of each channel.
    """

    gains: tuple[float, ...]
    tables: tuple[FrequencyTable, ...]

    def __post_init__(self) -> None:
        if len(self.gains) != len(self.tables) or not self.gains:
            raise ValueError(f"a rate of {len(self.gains)} gains and {len(self.tables)} tables")
        if not all(np.isfinite(self.gains)) or min(self.gains) <= 0:
            raise ValueError("a rate with a gain that is not above 0")


@dataclass(frozen=True, slots=True)
class LatentCodec:
    """Codes tensors of (channels, positions), single precision, at one of several rates. Thread-safe.

    A code of another model, cut or prior is refused.

    model: the name or digest of the model.
    cut: the name of the tensor.
    rates: the settings, in ascending order of the bytes they take.
    coder: the entropy coder.
    fingerprint: five bytes that identify model, cut and prior in each code.
    """

    model: str
    cut: str
    rates: tuple[Rate, ...]
    coder: int = field(default_factory=best_coder)
    fingerprint: bytes = field(init=False, repr=False, compare=False)
    _coders: tuple[EntropyCoder, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.rates) <= MOST_RATES or len({len(rate.gains) for rate in self.rates}) != 1:
            raise ValueError(f"a codec needs 1 to {MOST_RATES} rates of as many channels each")
        object.__setattr__(self, "_coders", tuple(EntropyCoder(rate.tables) for rate in self.rates))
        digests = (_digest(self.model)[:2], _digest(self.cut)[:1], _digest(repr(self.rates))[:2])
        object.__setattr__(self, "fingerprint", b"".join(digests))

    @property
    def channels(self) -> int:
        """How many channels a tensor has."""
        return len(self.rates[0].gains)

    def encode(self, tensor: NDArray[np.float32], rate: int) -> bytes:
        """Return `tensor` (channels, positions) as a code. Symbols beyond a channel's table are clipped to its ends.

        Raises CodeTooLong.
        """
        payload = self._coders[rate].encode(self.quantise(tensor, rate), self.coder)
        if len(payload) > MOST_PAYLOAD_BYTES:
            raise CodeTooLong(f"a tensor of shape {tensor.shape} does not fit one code; send it in pieces")
        first = VERSION << 5 | self.coder << 4 | rate
        length = min(len(payload), _LENGTH_FOLLOWS)
        model, cut, prior = struct.unpack("<HBH", self.fingerprint)
        header = _HEADER.pack(first, model, cut, prior, length)
        return header + (_LONG.pack(len(payload)) if length == _LENGTH_FOLLOWS else b"") + payload

    def encode_within(self, tensor: NDArray[np.float32], rate: int, most_bytes: int) -> tuple[bytes, int]:
        """Return the code with the highest rate up to `rate` that takes at most `most_bytes`, and that rate.

        Where the lowest rate takes more, the code is of the lowest rate. Raises CodeTooLong where it takes too much.
        """
        for lower in range(rate, 0, -1):
            with contextlib.suppress(CodeTooLong):
                if len(code := self.encode(tensor, lower)) <= most_bytes:
                    return code, lower
        return self.encode(tensor, 0), 0

    def decode(self, code: bytes, positions: int) -> tuple[NDArray[np.float32], int]:
        """Return the tensor (channels, positions) of a code, and its rate.

        Raises ProtocolError where the code is foreign (version, model, cut, prior), truncated or damaged.
        """
        rate, coder, payload = self._open(code)
        symbols = self._coders[rate].decode(payload, positions, coder)
        return (symbols / np.array(self.rates[rate].gains, dtype=np.float32)[:, None]).astype(np.float32), rate

    def quantise(self, tensor: NDArray[np.float32], rate: int) -> NDArray[np.int32]:
        """Return the symbols (channels, positions) of `tensor`: its values scaled, rounded and clipped."""
        coder = self._coders[rate]
        scaled = np.rint(tensor * np.array(self.rates[rate].gains, dtype=np.float32)[:, None])
        symbols: NDArray[np.int32] = np.clip(np.nan_to_num(scaled), coder.lows, coder.highs).astype(np.int32)
        return symbols

    def entropy_bytes(self, tensor: NDArray[np.float32], rate: int) -> float:
        """Return the fewest bytes that the symbols of `tensor` can take with the prior, without a header."""
        return self._coders[rate].bits(self.quantise(tensor, rate)) / 8

    def _open(self, code: bytes) -> tuple[int, int, bytes]:
        if len(code) < _HEADER.size:
            raise ProtocolError(f"code: {len(code)} bytes, a header alone has {_HEADER.size}; it is truncated")
        first, _, _, _, length = _HEADER.unpack_from(code)
        version, coder, rate = first >> 5, first >> 4 & 1, first & 15
        if version != VERSION:
            raise ProtocolError(f"code: of version {version}, known is {VERSION}; update the older side")
        names = (("model", 1, 3), ("cut", 3, 4), ("prior", 4, 6))
        for name, start, end in names:
            if code[start:end] != self.fingerprint[start - 1 : end - 1]:
                raise ProtocolError(f"code: of another {name}; give both sides the files of one training")
        if rate >= len(self.rates):
            raise ProtocolError(f"code: of rate {rate}, there are {len(self.rates)}; it is damaged")
        start = _HEADER.size
        if length == _LENGTH_FOLLOWS:
            if len(code) < start + _LONG.size:
                raise ProtocolError(f"code: {len(code)} bytes end inside its header; it is truncated")
            (length,) = _LONG.unpack_from(code, start)
            start += _LONG.size
        if len(code) - start != length:
            raise ProtocolError(
                f"code: {len(code) - start} bytes after its header, which says {length}; it is truncated"
            )
        return rate, coder, code[start:]


def fit_rate(tensors: NDArray[np.float32], gains: Sequence[float]) -> Rate:
    """Return a rate whose prior is counted on `tensors` (samples, channels, positions)."""
    factors = np.array(gains, dtype=np.float32)
    symbols = np.clip(np.rint(tensors * factors[None, :, None]), -LARGEST_SYMBOL, LARGEST_SYMBOL).astype(np.int32)
    return Rate(tuple(float(one) for one in factors), tuple(fit_table(symbols[:, i]) for i in range(len(factors))))


def fit_rate_to_size(tensors: NDArray[np.float32], gains: Sequence[float], mean_bytes: float) -> Rate:
    """Return a rate, as `fit_rate` does, whose codes of `tensors` take `mean_bytes` on average, header included.

    All gains are scaled by one factor, at most `MOST_SCALE` up or down, because the decoder was made for these gains.
    The bytes of a code beside the entropy of its symbols are first assumed, then measured.
    """
    assumed = _rate_of_size(tensors, gains, mean_bytes, _BESIDE_ENTROPY_BYTES)
    codec = LatentCodec("", "", (assumed,))
    taken_bytes = sum(_coded_bytes(codec, tensor) for tensor in tensors) / len(tensors)
    return _rate_of_size(tensors, gains, mean_bytes, taken_bytes - _entropy_bytes(assumed, tensors.shape[2]))


def _coded_bytes(codec: LatentCodec, tensor: NDArray[np.float32]) -> int:
    """Return the size of a code; of one that would be too long, the size of the longest payload."""
    try:
        return len(codec.encode(tensor, 0))
    except CodeTooLong:
        return MOST_PAYLOAD_BYTES


def _rate_of_size(tensors: NDArray[np.float32], gains: Sequence[float], mean_bytes: float, beside_bytes: float) -> Rate:
    """Return the rate at which the entropy and `beside_bytes` add up to `mean_bytes`."""
    factors, low, high = np.array(gains), 1 / MOST_SCALE, MOST_SCALE
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        rate = fit_rate(tensors, (factors * middle).tolist())
        is_below = _entropy_bytes(rate, tensors.shape[2]) + beside_bytes < mean_bytes
        low, high = (middle, high) if is_below else (low, middle)
    return fit_rate(tensors, (factors * low).tolist())


def _entropy_bytes(rate: Rate, positions: int) -> float:
    return sum(table.entropy_bits for table in rate.tables) * positions / 8


def fit_codec(
    tensors: NDArray[np.float32], model: str, cut: str, steps: Sequence[float] = (0.5, 0.25, 0.125)
) -> LatentCodec:
    """Return a codec for tensors like `tensors` (samples, channels, positions), without any training.

    For programs that import it (docs/usage.md): no command of ours needs it.

    steps: for each rate, coarsest first, the distance between two levels as a share of a channel's standard deviation.
        The error of a value is at most half of it, inside the range of `tensors`.

    Of a language model's hidden states, channels are elements of the embedding, and positions are tokens.
    """
    deviation = np.maximum(tensors.std(axis=(0, 2)), 1e-6)
    return LatentCodec(model, cut, tuple(fit_rate(tensors, 1 / (deviation * step)) for step in steps))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
