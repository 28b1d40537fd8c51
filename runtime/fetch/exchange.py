"""Exchanges pieces of models with other devices over the data link: a thread that sends and fetches pieces.

A request names the model and the number of a piece, or of a part of the list of digests; the answer has the bytes. An
answer that is not waited for is dropped unread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import DeviceLost, EdgeRunError, MeshError, ProtocolError
from edge_run.base.fields import Document, Fields
from edge_run.base.interrupt import go_on
from edge_run.base.mesh import Link, Message
from edge_run.runtime.fetch.fingerprint import Fingerprint
from edge_run.runtime.fetch.transfer import DIGESTS, PIECE, Sink, Transfer
from edge_run.tiers import _libc
from edge_run.tiers.pieces import Pieces, read_at

logger = logging.getLogger(__name__)

POLL_S, IDLE_POLL_S = 0.1, 0.5  # while something is fetched, and else
SEND_TIMEOUT_S = 4.0
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """A model that is here as a whole."""

    found: Fingerprint
    paths: tuple[Path, ...]

    def read(self, what: str, number: int) -> bytes:
        """Return a part. Raises LookupError for none of it, OSError where it cannot be read."""
        if what not in (PIECE, DIGESTS):
            raise LookupError(what)
        parts = Pieces(self.found.sizes if what == PIECE else [len(self.found.digests)])
        if not 0 <= number < parts.count:
            raise LookupError(number)
        place = parts.place(number)
        if what == DIGESTS:
            return self.found.digests[place.offset : place.offset + place.length]
        descriptor = os.open(self.paths[place.shard], os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = read_at(descriptor, place.length, place.offset)
            _libc.forget_pages(descriptor, place.offset, place.length)
            return data
        finally:
            os.close(descriptor)


class PieceExchange:
    """Sends and fetches pieces on its own thread until it is closed. One transfer at a time."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._offers: dict[str, _Offer] = {}
        self._transfer: Transfer | None = None
        self._at_work = threading.Lock()  # on the transfer
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="edge-run pieces", daemon=True)

    def start(self) -> None:
        """Begin to listen to who asks."""
        self._thread.start()

    def offer(self, found: Fingerprint, paths: Sequence[Path]) -> None:
        """Give pieces of a model that is here as a whole to whoever of the mesh asks."""
        self._offers[found.model] = _Offer(found, tuple(paths))

    def fetch(self, sink: Sink, wanted: Sequence[int], providers: Sequence[str]) -> Transfer:
        """Begin to fetch, in place of what is fetched now."""
        self.stop()
        with self._at_work:
            self._transfer = transfer = Transfer(sink, wanted, providers)
        return transfer

    def fetch_now(
        self, sink: Sink, wanted: Sequence[int], provider: str, timeout_s: float, check: Callable[[], None] = go_on
    ) -> None:
        """Fetch, and wait for it. check: runs meanwhile, and may raise.

        Raises MeshError, which names the provider, where it does not come; TierReadError where it cannot be kept here.
        """
        transfer, until = self.fetch(sink, wanted, [provider]), time.monotonic() + timeout_s
        try:
            while not (is_over := transfer.over.wait(POLL_S)) and time.monotonic() < until:
                check()
        finally:
            self.stop()
        if transfer.error is not None:
            raise transfer.error
        if transfer.why:
            sent = f"sent {transfer.done_bytes} of {transfer.wanted_bytes} bytes"
            if not is_over:
                raise MeshError(f"{sent} in {timeout_s:.0f} s; see to the network between them", node=provider)
            raise MeshError(f"{sent}: {transfer.failures.get(provider, transfer.why)}", node=provider)

    def stop(self) -> None:
        """Fetch no more; what came is kept, and the sink left alone."""
        with self._at_work:
            transfer, self._transfer = self._transfer, None
            if transfer is not None and not transfer.over.is_set():
                with contextlib.suppress(EdgeRunError):
                    transfer.sink.sync()
                transfer.end("was stopped")

    def close(self) -> None:
        """Stop, and join the thread. Idempotent; the link is not closed."""
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
        self.stop()

    def _run(self) -> None:
        while not self._is_closed:
            transfer = self._transfer
            is_idle = transfer is None or transfer.over.is_set()
            try:
                message = self._link.receive(timeout_s=IDLE_POLL_S if is_idle else POLL_S, is_bulk=True)
            except DeviceLost as error:
                self._lose(error.node, error.message)
                continue
            except MeshError as error:
                logger.info("%s", error)
                break
            try:
                if message is not None and message.header.get("kind") == "want":
                    self._give(message)
                    message = None
                self._carry_on(message)
            except Exception:
                logger.exception("a mistake of ours; a message is left aside")
        self.stop()

    def _give(self, message: Message) -> None:
        """Answer who asks for a part."""
        parts: list[memoryview] = []
        try:
            fields = Fields(message.header, "a wish", message.node)
            what, model, number = fields.name("what"), fields.name("model"), fields.integer("number")
        except ProtocolError as error:
            logger.info("%s", error)
            return
        header: Document = {"kind": "have", "what": what, "model": model, "number": number}
        try:
            parts = [memoryview(self._offers[model].read(what, number))]
        except (LookupError, OSError) as error:
            header = {**header, "kind": "lack"}
            logger.info("node %s asks for what is not here: %r", message.node, error)
        try:
            self._link.send(message.node, header, parts, timeout_s=SEND_TIMEOUT_S, is_bulk=True)
        except EdgeRunError as error:
            logger.info("%s", error)

    def _carry_on(self, message: Message | None) -> None:
        """Take in what came for the transfer at hand, if there is one, and ask for more."""
        with self._at_work:
            transfer = self._transfer
            if transfer is None or transfer.over.is_set():
                return
            try:
                if message is not None:
                    _take(message, transfer)
                self._ask(transfer)
                transfer.settle()
            except EdgeRunError as error:
                transfer.end_with(error)

    def _ask(self, transfer: Transfer) -> None:
        for node, number in transfer.fetching.next(time.monotonic()):
            if not transfer.fetching.was_asked(node, number):
                continue  # what it was asked for just before did not reach it; each such wait would hold up all others
            header: Document = {
                "kind": "want",
                "what": transfer.sink.what,
                "model": transfer.sink.model,
                "number": number,
            }
            try:
                self._link.send(node, header, timeout_s=SEND_TIMEOUT_S, is_bulk=True)
            except MeshError as error:
                transfer.fetching.fail(node, "is not reached" if isinstance(error, DeviceLost) else error.message)

    def _lose(self, node: str, why: str) -> None:
        with self._at_work:
            if self._transfer is not None:
                self._transfer.fetching.fail(node, why)


def _take(message: Message, transfer: Transfer) -> None:
    """Take in an answer; what is none, or not for this transfer, is dropped. Raises TierReadError."""
    header, number = message.header, message.header.get("number")
    if type(number) is not int or (header.get("what"), header.get("model")) != (
        transfer.sink.what,
        transfer.sink.model,
    ):
        return
    if header.get("kind") == "lack" and transfer.fetching.was_asked(message.node, number):
        transfer.fetching.fail(message.node, "does not have it any more")
    elif header.get("kind") == "have" and len(message.parts) == 1:
        transfer.take(message.node, number, message.parts[0])
