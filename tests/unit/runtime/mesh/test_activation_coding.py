"""When activations go in fewer bytes: by the speed of the link, what coding takes, and rounded where that was asked."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from edge_run.base.errors import ProtocolError
from edge_run.partition.activation_codec import encode_activations
from edge_run.runtime.mesh.activation_coding import ActivationCoder, SentActivations, decode

STATE = np.random.default_rng(5).standard_normal(4096).astype(np.float32)
FLOATS = memoryview(STATE)  # of format f, as a slice hands them over
PLACES = memoryview(np.arange(64, dtype=np.int32)).cast("B")


def coder(activations: str, mbits: float, coding_s: float = 1e-5) -> tuple[ActivationCoder, SentActivations]:
    """Return one whose clock says that each coding takes so long."""
    tally, ticks = SentActivations(), itertools.count()
    return ActivationCoder(activations, {"b": mbits / 8 * 1e6}, tally, lambda: next(ticks) * coding_s), tally


@pytest.mark.parametrize(
    ("activations", "mbits", "kind"),
    [
        ("exact", 5, "packed"),
        ("exact", 10_000, "plain"),
        ("compact", 5, "compact"),
        ("compact", 10_000, "plain"),
    ],
)
def test_the_link_decides_and_the_user_allows(activations: str, mbits: float, kind: str) -> None:
    one, tally = coder(activations, mbits)
    kinds, parts = one.encode("b", [FLOATS, PLACES])
    assert kinds == [kind, "plain"], "what is no number goes as it is"
    assert tally.activations == {kind: 1}
    assert tally.plain_bytes == 16384 + 256
    assert tally.sent_bytes == sum(part.nbytes for part in parts)
    back = [bytes(part) for part in decode(kinds, [memoryview(bytes(part)) for part in parts], [16384, 256])]
    assert back[1] == bytes(PLACES)
    if kind == "compact":
        assert np.abs(np.frombuffer(back[0], np.float32) - STATE).max() < 0.02
        assert parts[0].nbytes < 0.32 * STATE.nbytes
    else:
        assert back[0] == STATE.tobytes()


def test_where_coding_turns_out_to_take_too_long_it_ends() -> None:
    one, tally = coder("compact", 20, coding_s=0.1)
    for _ in range(5):
        one.encode("b", [FLOATS])
    assert tally.activations == {"compact": 1, "packed": 1, "plain": 3}


def test_to_whom_nothing_was_measured_states_go_as_they_are() -> None:
    one, tally = coder("compact", 1)
    assert one.encode("c", [FLOATS])[0] == ["plain"]
    assert tally.sent_bytes == tally.plain_bytes


def test_what_cannot_be_rounded_goes_as_it_is() -> None:
    one, _ = coder("compact", 5)
    kinds, parts = one.encode("b", [memoryview(np.array([1.0, np.inf] * 500, np.float32))])
    assert kinds == ["plain"]
    assert parts[0].nbytes == 4000


@pytest.mark.parametrize("kinds", ["packed", [], ["odd"], [["packed"]], [None], {"packed": 1}, 3])
def test_codes_that_nobody_knows_are_refused(kinds: object) -> None:
    with pytest.raises(ProtocolError):
        decode(kinds, [memoryview(b"1234")], [4])


@pytest.mark.parametrize(("activations", "mbits"), [("exact", 5), ("exact", 10_000), ("compact", 5)])
@pytest.mark.parametrize("sizes", [[16384], [16384, 252], [4096, 256], [1 << 40, 256], [16384, 256, 0], []])
def test_what_is_not_as_large_as_it_should_be_is_refused_before_it_takes_memory(
    activations: str, mbits: float, sizes: list[int]
) -> None:
    kinds, parts = coder(activations, mbits)[0].encode("b", [FLOATS, PLACES])
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="needed are"):
        decode(kinds, parts, sizes)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


def test_a_small_code_that_says_to_be_large_takes_no_memory() -> None:
    bomb = encode_activations(np.zeros((4096, 4096), np.float32))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="needed are"):
        decode(["compact"], [memoryview(bomb)], [16384])
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()
