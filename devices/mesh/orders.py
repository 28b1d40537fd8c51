"""Orders and their answers: those that this device gives and waits for, and those that it carries out, once each."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_run.base.error_codes import error_document, read_error
from edge_run.base.errors import DeviceLost, EdgeRunError, MeshError, ProtocolError
from edge_run.base.fields import Document, Fields, plain
from edge_run.base.mesh import Handler

logger = logging.getLogger(__name__)

MOST_WAITING, MOST_ANSWERS = 16, 64


@dataclass(frozen=True, slots=True)
class InboundOrder:
    """An order that came.

    node: who gave it.
    incarnation: of the node when it gave it.
    epoch: under which it was given.
    number: which of the node's orders it is.
    order: what is to be done.
    is_direct: it came over the data link, and so does its answer go.
    """

    node: str
    incarnation: str
    epoch: int
    number: int
    order: Document
    is_direct: bool = False


@dataclass(slots=True)
class OutboundOrder:
    """An order whose answer is waited for.

    body: what is sent.
    sent_s: when it was sent last.
    is_direct: it was sent over the data link last.
    answer: what came back.
    error: why nothing will come back.
    """

    node: str
    epoch: int
    body: Document
    sent_s: float = 0.0
    is_direct: bool = False
    answer: Document | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self.answer is not None or self.error is not None


@dataclass(slots=True)
class OutboundOrders:
    """The orders that this device gave. Guarded by its owner."""

    number: int = 0
    pending: dict[int, OutboundOrder] = field(default_factory=dict)

    def add(self, node: str, incarnation: str, epoch: int, order: Document) -> tuple[int, OutboundOrder]:
        """Note a new order, for `incarnation` of `node`: to a later one it says nothing."""
        self.number += 1
        self.pending[self.number] = OutboundOrder(
            node, epoch, {"number": self.number, "incarnation": incarnation, "order": order}
        )
        return self.number, self.pending[self.number]

    def take_answer(self, node: str, body: Document) -> None:
        """Note the answer of `node`. Raises ProtocolError where it is none."""
        number, answer, error = body.get("number"), body.get("answer"), body.get("error")
        if not isinstance(number, int) or not (isinstance(answer, dict) or isinstance(error, str)):
            raise ProtocolError("an answer that is none", node=node)
        pending = self.pending.get(number)
        if pending is not None and pending.node == node:
            pending.answer = answer if isinstance(answer, dict) else None
            pending.error = _refusal(Fields(body, "its answer", node)) if isinstance(error, str) else None

    def lose(self, node: str, why: str) -> None:
        """Note that `node` will not answer any more."""
        for pending in self.pending.values():
            if pending.node == node and pending.answer is None:
                pending.error = DeviceLost(why, node=node)


def _refusal(answer: Fields) -> MeshError | ProtocolError:
    """Return what is raised for a refused order. Its cause is the error that the other device met, and of whom."""
    try:
        cause = read_error(answer)
    except ProtocolError as error:
        return error
    refusal = MeshError(cause.message, node=answer.node)
    refusal.__cause__ = cause
    return refusal


def _told(error: EdgeRunError) -> Document:
    """Return `error` as another device is told it: its words may name files, whose names may be any bytes."""
    return {**error_document(error), "error": plain(error.message)}


class OrderExecutor:
    """Carries out orders with a handler, on its own thread. An order that comes twice gets the same answer twice."""

    def __init__(
        self,
        handler: Handler,
        obeys: Callable[[str, int], bool],
        answer: Callable[[InboundOrder, Document], None],
    ) -> None:
        """`obeys` is asked right before an order is carried out; `answer` sends an answer."""
        self._handler, self._obeys, self._answer = handler, obeys, answer
        self._orders: queue.Queue[InboundOrder | None] = queue.Queue(MOST_WAITING)
        self._answers: OrderedDict[tuple[str, str, int], Document | None] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="edge-run mesh orders", daemon=True)
        self._thread.start()

    def give(self, inbound: InboundOrder) -> None:
        """Have an order carried out, unless it is already, or was."""
        key = (inbound.node, inbound.incarnation, inbound.number)
        with self._lock:
            if key in self._answers and self._answers[key] is None:
                return
            if key not in self._answers:
                self._answers[key] = None
                while len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
        try:
            self._orders.put_nowait(inbound)
        except queue.Full:
            with self._lock:
                if self._answers.get(key) is None:  # else it was carried out, and is not to be again
                    self._answers.pop(key, None)
            logger.warning("order %d of node %s: dropped, %d wait already", inbound.number, inbound.node, MOST_WAITING)

    def close(self, timeout_s: float) -> None:
        """Carry out no more; wait for the order at hand."""
        while True:
            try:
                self._orders.put_nowait(None)
                break
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # the thread took them meanwhile
                    self._orders.get_nowait()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (inbound := self._orders.get()) is not None:
            key = (inbound.node, inbound.incarnation, inbound.number)
            answer = self._answers.get(key)
            if answer is None:
                answer = self._carry_out(inbound)
                with self._lock:
                    self._answers[key] = answer
            try:
                self._answer(inbound, answer)
            except EdgeRunError as error:  # such as an answer that is too large: who asked is told, and others served
                logger.warning("order %d of node %s: %s", inbound.number, inbound.node, error)
                with contextlib.suppress(EdgeRunError):
                    self._answer(inbound, _told(error))

    def _carry_out(self, inbound: InboundOrder) -> Document:
        if not self._obeys(inbound.node, inbound.epoch):
            return error_document(MeshError(f"epoch {inbound.epoch} is past: another coordinator has a later one"))
        try:
            return {"answer": dict(self._handler(inbound.node, inbound.epoch, inbound.order))}
        except DeviceLost as error:  # why would tell others which ports are open at addresses that they named
            return error_document(DeviceLost("is not reached", node=error.node))
        except EdgeRunError as error:
            return _told(error)
        except Exception:
            logger.exception("order %d of node %s", inbound.number, inbound.node)
            return error_document(EdgeRunError("a mistake of edge-run's own; what it writes about itself says more"))
