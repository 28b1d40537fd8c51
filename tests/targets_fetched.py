"""What is fetched from other devices of a mesh, and what is kept of it and of this device."""

from __future__ import annotations

import json
import os
import random
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from edge_run.base.units import KIB, MIB
from hostile import broken_bytes, broken_document, dump
from hostile_target import Target, in_file, target


@target
def fetched_pieces(folder: Path, stack: ExitStack) -> Target:
    """Questions for pieces, and answers, as they come over the data link: a header, then up to two parts."""

    from edge_run.base.mesh import Message
    from edge_run.devices.link import frames
    from edge_run.runtime.fetch.exchange import PieceExchange
    from edge_run.runtime.fetch.fingerprint import fingerprint
    from edge_run.runtime.fetch.transfer import DIGESTS, PIECE, DigestSink

    whole = folder / "model.gguf"
    whole.write_bytes(random.Random(1).randbytes(600_000))
    found = fingerprint([whole], folder / "cache")
    sent: list[Any] = []

    class Transport:
        def send(self, node: str, header: Any, parts: Any = (), **_: Any) -> None:
            frames.message_of(frames.Head(frames.FrameKind.BULK, 1, 1, header), parts)
            sent.append(header)

    exchange = PieceExchange(Transport())  # type: ignore[arg-type]
    exchange.offer(found, [whole])
    fixed = frames.pack(frames.Head(frames.FrameKind.BULK, 1, 1, {}))[:-2]

    def feed(data: bytes) -> bool:
        """The length of the header's text, that text, and the parts."""
        if len(data) < 6:
            return False
        n_header, n_part = struct.unpack_from("<IH", data)
        rest = data[6:]
        header = frames.unpack(memoryview(fixed + rest[:n_header])).header
        parts = [memoryview(part) for part in (rest[n_header:][:n_part], rest[n_header:][n_part:]) if part]
        sink = DigestSink(found.model, found.sizes)
        exchange.fetch(sink, range(sink.count), ["there"])
        exchange._carry_on(None)  # has asked for the first part
        sent.clear()
        message = Message("there", header, tuple(parts))
        if header.get("kind") == "want":
            exchange._give(message)
            return bool(sent) and sent[0]["kind"] == "have"
        exchange._carry_on(message)
        return sink.is_right

    def packed(header: Any, part: bytes = b"") -> bytes:
        text = dump(header)
        return struct.pack("<IH", len(text), len(part)) + text + part

    digests = {"kind": "have", "what": DIGESTS, "model": found.model, "number": 0}
    wants = [{"kind": "want", "what": what, "model": found.model, "number": 0} for what in (PIECE, DIGESTS)]
    seeds = [packed(digests, found.digests), *map(packed, wants)]

    def special(chance: random.Random) -> bytes:
        text = broken_document([digests, *wants, {**digests, "kind": "lack"}], chance)
        part = chance.choice((found.digests, b"", found.digests[:-1], broken_bytes(found.digests, seeds, chance)))
        return struct.pack("<IH", len(text), len(part)) + text + part

    from edge_run.base.errors import ProtocolError

    return Target("fetched pieces", feed, (ProtocolError,), seeds, 8 * MIB, special=special)


@target
def fetched_journals(folder: Path, stack: ExitStack) -> Target:
    """Journals of a model that is partly here."""
    from edge_run.base.errors import TierReadError
    from edge_run.tiers.partial import JOURNAL, PartialModel
    from edge_run.tiers.pieces import Pieces

    pieces = Pieces((5 * 262_144 + 100, 1000))

    def model() -> PartialModel:
        return PartialModel(folder / "partial", "m" * 64, pieces)

    one = model()
    for number in (0, 3, 5, 6):
        one.write(number, bytes(pieces.place(number).length))
    one.sync()
    one.give_up([3])
    one.close()
    journal = folder / "partial" / JOURNAL
    seeds = [journal.read_bytes()]

    def feed(data: bytes) -> bool:
        journal.write_bytes(data)
        with mock.patch.object(os, "fdatasync"), mock.patch.object(os, "fsync"):
            found = model()
        try:
            assert 0 <= pieces.total_bytes(found.beyond(())) <= sum(pieces.sizes)
            return found.missing(range(pieces.count)) == [1, 2, 3, 4]
        finally:
            found.close()

    return Target("fetched journals", feed, (TierReadError,), seeds, 4 * MIB)


# What devices keep about themselves


@target
def profiles(folder: Path, stack: ExitStack) -> Target:
    from datetime import datetime, timezone

    from edge_run.base.profile import DiskProfile, KernelSpeed, ReadSpeed, RepackedSpeed
    from edge_run.devices.host import profile

    when = "2026-01-02T03:04:05+00:00"
    speed = KernelSpeed("Q4_0", 512, 1, 1, False, 1e9)
    disk = DiskProfile("/", "/dev/x", "ext4", True, "", 1e9, (1e-11, 1e-10), (ReadSpeed(8 * MIB, 4, 1e9),))
    measured = profile.Measurements(
        (profile.KernelFigure(when, False, speed),),
        (profile.CostsFigure(when, False, profile.PassOverheads(4, 1e-6, 1e-5, (1e9, 1e10))),),
        (profile.DiskFigure(when, False, "8:1", disk),),
        (profile.GpuKernelFigure(when, False, "a GPU", speed, True),),
        (profile.GpuCostsFigure(when, False, "a GPU", profile.GpuCosts(1e9, 1e-6, 1e-6, (1e9, 1e10))),),
        (profile.RepackedFigure(when, False, RepackedSpeed("Q4_0", 512, 1, 1, False, 1e9, 1e9), True),),
    )
    store = profile.ProfileStore(folder, lambda: datetime(2026, 1, 2, 4, tzinfo=timezone.utc))
    identity = profile.MeasuredSetup("a processor", "x86_64", 4, 4.0, "a library")
    assert store.save(identity, measured)
    (path,) = (folder / "profiles").iterdir()
    seed = path.read_bytes()
    feed = in_file(path, lambda: store.load(identity).kernels)
    documents = [json.loads(seed)]
    return Target("profiles", feed, (), [seed], 32 * MIB, documents, largest_bytes=MIB)


@target
def ledger_files(folder: Path, stack: ExitStack) -> Target:
    """Grants of a process that lives, as another version or a failing disk may leave them."""

    from edge_run.devices.host import ledger, locks

    book = ledger.Ledger(folder / "ledger", lambda promised_bytes: 2**60 - promised_bytes(None))
    stack.enter_context(book.grant(MIB, "a model", 0))
    (path,) = (folder / "ledger").glob(f"{ledger._PREFIX}*")
    seed = path.read_bytes()
    other = {**json.loads(seed), "pid": os.getppid()}
    from edge_run.base.errors import BudgetError

    def feed(data: bytes) -> bool:
        path.write_bytes(data)
        runs = book.runs()
        assert all(isinstance(run.rest_bytes, int) for run in runs)
        with locks.locked(folder / "ledger" / "lock"):
            pass
        book.grant(MIB, "another", 0).close()
        return bool(runs)

    refusals = (BudgetError,)
    return Target(
        "ledger files", feed, refusals, [seed, dump(other)], 8 * MIB, [json.loads(seed), other], largest_bytes=60 * KIB
    )
