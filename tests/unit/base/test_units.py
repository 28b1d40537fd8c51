"""Sizes as people write and read them."""

import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.units import GIB, KIB, MIB, format_size, parse_size, round_down, round_up


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 * GIB),
        ("4G", 4 * GIB),
        ("4g", 4 * GIB),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("512MiB", 512 * MIB),
        ("512M", 512 * MIB),
        ("64K", 64 * KIB),
        ("1T", 1 << 40),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 GiB ", 2 * GIB),
        ("123456", 123456),
        ("123456B", 123456),
        (7, 7),
    ],
)
def test_sizes_mean_what_llama_cpp_and_docker_take_them_for(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "four", "4X", "-4GiB", "4GiBs", "4,5G", "1e9", "0x10", "4 4", "0", "0GiB", "0.2", 0, -1, "٤x"]
)
def test_what_is_no_size_is_refused_with_what_was_found(text: str | int) -> None:
    with pytest.raises(ConfigError, match="size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "T", "2000000T", 1 << 61, 10**400])
def test_what_nothing_has_is_refused_in_a_short_line(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"size .*: more than any memory or drive has") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 130


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (740, "740 B"),
        (1024, "1 KiB"),
        (512 * MIB, "512 MiB"),
        (4_090_000_000, "3.81 GiB"),
        (-2 * MIB, "-2 MiB"),
    ],
)
def test_sizes_are_short_to_read(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


def test_rounding_keeps_multiples_and_moves_everything_else_outwards() -> None:
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [round_down(n, 8) for n in (0, 7, 8, 15)] == [0, 0, 8, 8]
