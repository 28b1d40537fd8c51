"""Codes: whatever is encoded comes back, sizes follow the prior, and no bytes whatsoever do harm."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ProtocolError
from edge_run.partition import latent_codec
from edge_run.partition.entropy_coding import RANGE, ZSTD
from edge_run.partition.latent_codec import (
    MOST_SCALE,
    CodeTooLong,
    LatentCodec,
    fit_codec,
    fit_rate,
    fit_rate_to_size,
)

CHANNELS, POSITIONS = 6, 20
HEADER_BYTES = 7
CODERS = (RANGE, ZSTD)


@cache
def codec(coder: int, model: str = "model", cut: str = "cut", seed: int = 0) -> LatentCodec:
    made = fit_codec(samples(100, seed), model, cut)
    return dataclasses.replace(made, coder=coder)


def samples(count: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.normal(size=(1, CHANNELS, 1)))
    return (generator.laplace(size=(count, CHANNELS, POSITIONS)) * scales).astype(np.float32)


seeds = st.integers(0, 1000)
coders = st.sampled_from(CODERS)
rates = st.integers(0, 2)


@given(seeds, coders, rates, st.integers(1, 50), st.floats(0, 100))
def test_what_is_encoded_comes_back(seed: int, coder: int, rate: int, positions: int, scale: float) -> None:
    """Whatever the values are: beyond the prior's table they are clipped, on both sides alike."""
    one = codec(coder)
    tensor = (np.random.default_rng(seed).normal(size=(CHANNELS, positions)) * scale).astype(np.float32)
    decoded, found = one.decode(one.encode(tensor, rate), positions)
    assert found == rate
    assert np.array_equal(one.quantise(decoded, rate), one.quantise(tensor, rate))


@pytest.mark.parametrize("coder", CODERS)
def test_what_has_no_room_in_one_code_takes_a_lower_rate(coder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensor = codec(coder), samples(1, 5)[0]
    sizes = [len(one.encode(tensor, rate)) - HEADER_BYTES for rate in range(3)]
    assert sizes[0] < sizes[1] < sizes[2]
    for rate in range(3):
        monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", sizes[rate])
        assert one.encode_within(tensor, 2, 1 << 20)[1] == rate
    monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", sizes[0] - 1)
    with pytest.raises(CodeTooLong):
        one.encode_within(tensor, 2, 1 << 20)


@given(seeds, rates)
def test_error_is_at_most_half_a_step_inside_the_table(seed: int, rate: int) -> None:
    one = codec(RANGE)
    tensor = samples(3, 0)[seed % 3]
    decoded, _ = one.decode(one.encode(tensor, rate), POSITIONS)
    gains = np.array(one.rates[rate].gains)[:, None]
    assert np.all(np.abs(decoded - tensor) * gains <= 0.5 + 1e-4)


@given(seeds, rates, st.integers(1, 60))
def test_size_follows_the_prior(seed: int, rate: int, positions: int) -> None:
    """At most 1.05 times the entropy and 8 bytes, header included, from one position to many."""
    one = codec(RANGE)
    tensor = np.concatenate([*samples(3, seed)], axis=1)[:, :positions]
    assert len(one.encode(tensor, rate)) <= 1.05 * one.entropy_bytes(tensor, rate) + 8


@settings(max_examples=300)
@given(st.binary(max_size=200), coders, st.integers(1, 30))
def test_bytes_from_anywhere_are_refused_or_decoded(data: bytes, coder: int, positions: int) -> None:
    one = codec(coder)
    code = one.encode(samples(1, 1)[0], 1)
    for made in (data, code[:7] + data, code[:6] + bytes([min(len(data), 255)]) + data):
        try:
            decoded, _ = one.decode(made, positions)
        except ProtocolError:
            continue
        assert decoded.shape == (CHANNELS, positions)


@given(seeds, coders, st.data())
def test_truncated_codes_are_refused(seed: int, coder: int, data: st.DataObject) -> None:
    code = codec(coder).encode(samples(1, seed)[0], 2)
    cut = data.draw(st.integers(0, len(code) - 1))
    with pytest.raises(ProtocolError, match="truncated"):
        codec(coder).decode(code[:cut], POSITIONS)
    with pytest.raises(ProtocolError):
        codec(coder).decode(code + b"\0", POSITIONS)


@pytest.mark.parametrize(
    ("word", "foreign"),
    [("model", ("other", "cut", 0)), ("cut", ("model", "other", 0)), ("prior", ("model", "cut", 9))],
)
def test_foreign_codes_are_refused(word: str, foreign: tuple[str, str, int]) -> None:
    code = codec(RANGE, *foreign).encode(samples(1, 0)[0], 0)
    with pytest.raises(ProtocolError, match=f"another {word}"):
        codec(RANGE).decode(code, POSITIONS)


def test_other_versions_and_rates_are_refused() -> None:
    code = codec(RANGE).encode(samples(1, 0)[0], 0)
    for first, reason in ((code[0] ^ 0x40, "version"), (code[0] | 15, "rate 15")):
        with pytest.raises(ProtocolError, match=reason):
            codec(RANGE).decode(bytes([first]) + code[1:], POSITIONS)


def test_a_zstd_code_that_says_it_is_huge_allocates_nothing() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(60_000_000))
    one = codec(ZSTD)
    header = one.encode(samples(1, 0)[0], 0)[:6]
    assert len(bomb) < 65536
    with pytest.raises(ProtocolError, match="60000000 bytes when unpacked"):
        one.decode(header + b"\xff" + len(bomb).to_bytes(2, "little") + bomb, POSITIONS)


def test_a_limit_takes_a_lower_rate() -> None:
    one, tensor = codec(RANGE), samples(1, 0)[0]
    sizes = [len(one.encode(tensor, rate)) for rate in range(3)]
    assert sizes == sorted(sizes)
    assert one.encode_within(tensor, 2, sizes[1])[1] == 1
    assert one.encode_within(tensor, 2, 1)[1] == 0
    assert one.encode_within(tensor, 2, 10_000)[1] == 2


def test_numbers_that_are_none_are_coded_as_zero() -> None:
    tensor = np.full((CHANNELS, POSITIONS), np.nan, dtype=np.float32)
    tensor[0] = np.inf
    decoded, _ = codec(RANGE).decode(codec(RANGE).encode(tensor, 0), POSITIONS)
    assert np.all(np.isfinite(decoded))


@settings(max_examples=5, deadline=None)
@given(st.floats(0.97, 1.03), seeds)
@example(1.015625, 170)
def test_a_rate_is_brought_to_its_size_as_far_as_its_gains_may_change(share: float, seed: int) -> None:
    def mean_bytes(gains: tuple[float, ...]) -> float:
        one = LatentCodec("model", "cut", (fit_rate(tensors, gains),))
        return sum(len(one.encode(tensor, 0)) for tensor in tensors) / len(tensors)

    tensors, gains = samples(200, seed), (2.0,) * CHANNELS
    wanted = mean_bytes(gains) * share
    found = fit_rate_to_size(tensors, gains, wanted)
    scale = found.gains[0] / 2
    assert found.gains == pytest.approx([2 * scale] * CHANNELS)
    assert 1 / MOST_SCALE <= scale * 1.001 <= MOST_SCALE * 1.002
    assert mean_bytes(found.gains) == pytest.approx(wanted, abs=1)
    for impossible, end in ((1.0, 1 / MOST_SCALE), (1e9, MOST_SCALE)):
        assert fit_rate_to_size(tensors, gains, impossible).gains[0] == pytest.approx(2 * end, rel=0.01)


def test_a_size_is_found_although_single_tensors_have_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, gains = samples(200, 3), (2.0,) * CHANNELS
    wanted = fit_rate_to_size(tensors, gains, 60.0)
    sizes = [len(LatentCodec("", "", (wanted,)).encode(one, 0)) for one in tensors]
    monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", sorted(sizes)[-10] - HEADER_BYTES)
    assert fit_rate_to_size(tensors, gains, 60.0).gains == pytest.approx(wanted.gains, rel=0.02)
