"""Activations in code come back near, in as few bytes as promised; what is no code is refused."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge_run.base.errors import ProtocolError
from edge_run.partition.activation_codec import (
    BLOCK,
    MOST_VALUES,
    STEPS,
    decode_activations,
    encode_activations,
    is_worthwhile,
    pack_floats,
    unpack_floats,
)

SHAPES = st.tuples(st.integers(0, 5), st.integers(0, 150))
VALUES = st.floats(-60000, 60000, width=32)


def trained_like(rows: int, columns: int, outliers: int) -> np.ndarray:
    """Return activations as models have them: even, but for a few channels."""
    random = np.random.default_rng(3)
    activations = random.standard_normal((rows, columns)).astype(np.float32)
    activations[:, random.choice(columns, outliers, replace=False)] *= 300
    return activations


@given(arrays.arrays(np.float32, SHAPES, elements=VALUES))
def test_what_comes_back_is_near(activations: np.ndarray) -> None:
    code = encode_activations(activations)
    back = decode_activations(code)
    assert back.shape == activations.shape
    assert back.dtype == np.float32
    flat = np.zeros(-(-activations.size // BLOCK) * BLOCK, np.float32)
    flat[: activations.size] = activations.ravel()
    largest = np.repeat(np.abs(flat.reshape(-1, BLOCK)).max(axis=1, initial=0.0), BLOCK)[: activations.size]
    allowed = np.maximum(largest / STEPS * 0.51, 1e-5) + np.abs(activations.ravel()) * 2.0**-10
    assert (np.abs(back.ravel() - activations.ravel()) <= allowed).all()


def test_outliers_do_not_spoil_their_neighbours() -> None:
    activations = trained_like(64, 4096, 8)
    back = decode_activations(encode_activations(activations))
    ordinary = np.abs(activations) < 10
    assert np.abs(back - activations)[ordinary].max() < 0.05
    assert (np.abs(back - activations) / np.abs(activations))[~ordinary].max() < 2.0**-10
    assert len(encode_activations(activations)) < 0.27 * activations.nbytes


def head_of_noise(rows: int, columns: int, outliers: int, noise: bytes) -> bytes:
    return struct.pack("<4sIII", b"ERS1", rows, columns, outliers) + noise


def packed_noise(exponents: bytes, planes: bytes) -> bytes:
    """Return noise behind a head that is right: so many exponents, packed, and three bytes more of each number."""
    n_numbers = len(planes) // 3
    return struct.pack("<II", n_numbers, len(exponents)) + exponents + planes[: 3 * n_numbers]


FEW = st.integers(0, 9)
NOISE = st.binary(max_size=300)


@given(NOISE | st.builds(head_of_noise, FEW, FEW, FEW, NOISE))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_activations(noise)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_damage_is_refused_or_gives_finite_states(data: st.DataObject, outcomes: Counter[str]) -> None:
    code = bytearray(encode_activations(trained_like(2, 200, 3)))
    place = data.draw(st.integers(0, len(code) - 1))
    code[place] ^= data.draw(st.integers(1, 255))
    try:
        assert np.isfinite(decode_activations(bytes(code))).all()
        outcomes["taken"] += 1
    except ProtocolError:
        outcomes["refused"] += 1


def test_claims_are_checked_before_memory_is_taken() -> None:
    packed = zstandard.compress(bytes(1 << 28))  # a quarter of a GiB in some kilobytes
    for rows, columns, outliers in ((1 << 31, 1 << 31, 0), (1, 64, 1 << 31), (1, 64, 0)):
        with pytest.raises(ProtocolError):
            decode_activations(struct.pack("<4sIII", b"ERS1", rows, columns, outliers) + packed)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e6])
def test_what_cannot_be_coded_is_said(wrong: float) -> None:
    with pytest.raises(ProtocolError):
        encode_activations(np.full((1, 64), wrong, np.float32))


def test_when_it_pays() -> None:
    assert is_worthwhile(1 << 20, 1 << 18, 10e6, 500e6)
    assert not is_worthwhile(1 << 20, 1 << 18, 1e9, 500e6)
    assert not is_worthwhile(1 << 20, 1 << 20, 1e3, 500e6)


@given(st.binary(max_size=600))
def test_packed_numbers_come_back_bit_for_bit(noise: bytes) -> None:
    """Whatever the bits are: also what is no number."""
    floats = noise[: len(noise) // 4 * 4]
    assert bytes(unpack_floats(pack_floats(memoryview(floats)))) == floats


def test_packed_states_are_a_seventh_shorter() -> None:
    activations = trained_like(64, 4096, 8)
    code = pack_floats(memoryview(activations).cast("B"))
    assert len(code) < 0.88 * activations.nbytes
    assert bytes(unpack_floats(memoryview(code))) == activations.tobytes()


@given(NOISE | st.builds(packed_noise, NOISE, NOISE))
def test_noise_that_says_to_be_packed_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_floats(noise)


@given(st.data())
def test_damage_to_packed_numbers_is_refused_or_gives_as_many(data: st.DataObject) -> None:
    code = bytearray(pack_floats(memoryview(trained_like(2, 200, 3)).cast("B")))
    for _ in range(data.draw(st.integers(1, 4))):
        code[data.draw(st.integers(0, len(code) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert len(unpack_floats(code[: data.draw(st.integers(0, len(code)))])) == 1600


def test_a_packed_code_cannot_ask_for_more_memory_than_it_has_bytes() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(MOST_VALUES))
    for size in (MOST_VALUES, MOST_VALUES + 1, 1 << 31):
        with pytest.raises(ProtocolError, match="cannot be"):
            unpack_floats(struct.pack("<II", size, len(bomb)) + bomb)
