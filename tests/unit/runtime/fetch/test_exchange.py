"""What is given to who asks, and what is said of a transfer that ends short: whose doing it was, in words for it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.errors import DeviceLost, MeshError, TierReadError
from edge_run.base.mesh import Message
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.fetch.fingerprint import Fingerprint
from edge_run.runtime.fetch.store import FetchedModels
from edge_run.runtime.fetch.transfer import PieceSink, Transfer
from edge_run.tiers.pieces import PIECE_BYTES, model_hash, piece_digest
from fake_mesh import Hub

DATA = bytes(range(256)) * (2 * PIECE_BYTES // 256)
SIZES = (len(DATA),)
DIGESTS = b"".join(piece_digest(DATA[start : start + PIECE_BYTES]) for start in range(0, len(DATA), PIECE_BYTES))
MODEL = model_hash(SIZES, DIGESTS)


@contextlib.contextmanager
def fetching(folder: Path, *, is_offered: bool = True) -> Iterator[tuple[PieceExchange, PieceSink]]:
    """Give the exchange and the sink of a device that lacks a model, beside a device `a` that has it."""
    path = folder / "model.gguf"
    path.write_bytes(DATA)
    hub = Hub()
    giving, taking = PieceExchange(hub.join("a")), PieceExchange(hub.join("b"))
    with contextlib.ExitStack() as stack:
        if is_offered:
            giving.offer(Fingerprint(SIZES, DIGESTS), [path])
        for one in (giving, taking):
            stack.callback(one.close)
        giving.start()
        fetched = FetchedModels(folder / "fetched", 1 << 30).open(MODEL, SIZES, DIGESTS)
        stack.callback(fetched.close)
        taking.start()
        yield taking, PieceSink(fetched)


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let no file be written beyond `size_bytes` in this block."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_cannot_be_kept_here_is_nobody_elses_doing(tmp_path: Path) -> None:
    with (
        fetching(tmp_path) as (exchange, sink),
        files_of_at_most(PIECE_BYTES),
        pytest.raises(TierReadError, match=r"cannot keep fetched weights there \(File too large\)"),
    ):
        exchange.fetch_now(sink, range(2), "a", 20.0)


def test_a_piece_is_sent_whole_where_the_file_system_gives_less_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of one is other bytes than the model has, and who sends it is asked no more."""
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, offset: read(file, min(length, 100_000), offset))
    with fetching(tmp_path) as (exchange, sink):
        exchange.fetch_now(sink, range(2), "a", 20.0)
    assert (tmp_path / "fetched" / MODEL / "model.gguf").read_bytes() == DATA


def test_of_digests_there_are_as_many_parts_as_their_list_has(tmp_path: Path) -> None:
    """Fewer than pieces of the model; what is not there is lacked, and nothing is sent in its place."""
    path, sent = tmp_path / "model.gguf", list[tuple[str, int]]()
    path.write_bytes(DATA)

    def send(node: str, header: Any, parts: Any, **_: object) -> None:
        sent.append((header["kind"], sum(map(len, parts))))

    exchange = PieceExchange(SimpleNamespace(send=send))  # type: ignore[arg-type]
    exchange.offer(Fingerprint(SIZES, DIGESTS), [path])
    for what, number in (("piece", 1), ("piece", 2), ("digests", 0), ("digests", 1), ("else", 0)):
        exchange._give(Message("b", {"kind": "want", "what": what, "model": MODEL, "number": number}, ()))
    assert sent == [("have", PIECE_BYTES), ("lack", 0), ("have", len(DIGESTS)), ("lack", 0), ("lack", 0)]


def test_who_is_not_reached_is_waited_for_once() -> None:
    """Each wait takes seconds, in which nothing is taken in, and nobody else asked."""
    asked = list[int]()

    def send(node: str, header: Any, **_: object) -> None:
        asked.append(header["number"])
        raise DeviceLost("does not answer", node=node)

    sink: Any = SimpleNamespace(what="piece", model=MODEL, length=lambda number: 1)
    transfer = Transfer(sink, range(20), ["a"])
    came = transfer.fetching.next(0.0)
    while len(came) < 4:
        for node, number in came:
            transfer.fetching.came(node, number, 0.0)
        came = transfer.fetching.next(0.0)
    for node, number in came:
        transfer.fetching.came(node, number, 0.0)
    exchange = PieceExchange(SimpleNamespace(send=send))  # type: ignore[arg-type]
    exchange._ask(transfer)
    assert len(asked) == 1
    assert transfer.failures == {"a": "is not reached"}


def test_who_does_not_have_it_is_named_with_its_reason_alone(tmp_path: Path) -> None:
    with (
        fetching(tmp_path, is_offered=False) as (exchange, sink),
        pytest.raises(MeshError, match=r"sent 0 of 524288 bytes: does not have it any more$") as caught,
    ):
        exchange.fetch_now(sink, range(2), "a", 20.0)
    assert caught.value.node == "a"


def test_who_sends_nothing_in_time_is_said_to(tmp_path: Path) -> None:
    with fetching(tmp_path) as (exchange, sink), pytest.raises(MeshError, match="sent 0 of 524288 bytes in 0 s; see"):
        exchange.fetch_now(sink, range(2), "nobody", 0.0)
