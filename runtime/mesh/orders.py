"""Orders to the devices of a run: given to several at once, and what it means when one of them does not obey."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from edge_run.base.errors import DeviceLost, EdgeRunError, MeshError, ProtocolError, lacks_room
from edge_run.base.fields import Fields
from edge_run.base.mesh import Document, Mesh
from edge_run.runtime.mesh.failover import Gone, LessRoom, Refused

STATUS_TIMEOUT_S = 3.0
CHECK_S = 0.1

_Answer = TypeVar("_Answer")


class Failed(Exception):
    """A device did not do what it was ordered to: `event` says which, and why."""

    def __init__(self, event: Gone | Refused | LessRoom) -> None:
        super().__init__(str(event))
        self.event = event


class RunOrders:
    """Gives orders to the devices of a run. Not thread-safe."""

    def __init__(self, mesh: Mesh, check: Callable[[], None]) -> None:
        """check: runs while it waits for answers, and may raise to stop."""
        self._mesh, self._check = mesh, check
        self._holding: set[str] = set()  # devices that opened the model, or a slice of it, and were not released

    def expect_release(self, nodes: Iterable[str]) -> None:
        """Note that `nodes` are about to open the model, so that `release` has them close it."""
        self._holding.update(nodes)

    def give(self, orders: Mapping[str, Document], timeout_s: float) -> dict[str, Document]:
        """Give each device its order, all at once; return the answers. Raises Failed for the first that fails.

        Where it is stopped, what devices still do is nobody's.
        """
        return self._give(orders, timeout_s, self._check)

    def _give(self, orders: Mapping[str, Document], timeout_s: float, check: Callable[[], None]) -> dict[str, Document]:
        if not orders:
            return {}
        calls: dict[str, Callable[[], Document]] = {
            node: functools.partial(self._mesh.order, node, order, timeout_s=timeout_s)
            for node, order in orders.items()
        }
        pool = ThreadPoolExecutor(len(orders), thread_name_prefix="edge-run-order")
        try:
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no more threads: in turn, then
                given = {node: pool.submit(call) for node, call in calls.items()}
                while wait(given.values(), CHECK_S).not_done:
                    check()
                calls = {node: one.result for node, one in given.items()}
            return {node: judged(node, call) for node, call in calls.items()}
        finally:
            pool.shutdown(wait=False)

    def holds(self, node: str) -> bool:
        """Return whether `node` may have the model open."""
        return node in self._holding

    def release(self, nodes: Collection[str] | None = None) -> None:
        """Let all devices, or `nodes` of them, give up what they hold, as far as they hear it."""
        present = {member.node for member in self._mesh.members()}
        chosen = self._holding if nodes is None else self._holding.intersection(nodes)
        freed, self._holding = chosen & present, self._holding - chosen
        with contextlib.suppress(Failed):
            self._give({node: {"order": "close"} for node in freed}, STATUS_TIMEOUT_S, lambda: None)

    def who_is_stuck(self, nodes: Sequence[str]) -> Gone:
        """Return which of `nodes` keeps the others waiting: one that does not answer, or else one that computes."""
        computing = []
        for node in nodes:
            try:
                answer = self._mesh.order(node, {"order": "status"}, timeout_s=STATUS_TIMEOUT_S)
            except EdgeRunError as error:
                return Gone(node, error.message)
            if Fields(answer, "its answer", node).words("place").startswith("computing"):
                computing.append(node)
        return Gone((computing or list(nodes))[0], "it did not do its part in time")


def judged(node: str, call: Callable[[], _Answer]) -> _Answer:
    """Return what `call`, which reads what `node` says, returns. Raises Failed where it refuses, or has no room."""
    try:
        return call()
    except DeviceLost as error:
        raise Failed(Gone(node, error.message)) from error
    except (MeshError, ProtocolError) as error:
        if isinstance(error.__cause__, EdgeRunError) and lacks_room(error.__cause__):
            raise Failed(LessRoom(node, error.__cause__)) from error
        is_for_now = isinstance(error, MeshError)
        raise Failed(Refused(node, error.message, about=_about(node, error), is_for_now=is_for_now)) from error


def _about(node: str, error: MeshError | ProtocolError) -> str:
    """Return the device that `error`, which `node` refused an order for, is said of; empty where that is `node`."""
    cause = error.__cause__ if isinstance(error.__cause__, MeshError | ProtocolError) else error
    return "" if cause.node == node else cause.node
