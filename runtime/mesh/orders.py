"""Orders to the devices of a run: given to several at once, and what it means when one of them does not obey."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from edge_run.base.errors import DeviceLost, EdgeRunError, MeshError, ProtocolError, lacks_room
from edge_run.base.fields import MOST_BYTES, Document, Fields
from edge_run.base.interrupt import CHECK_S
from edge_run.base.mesh import HasLeft, Mesh, names_apart
from edge_run.base.units import format_size
from edge_run.runtime.mesh.failover import Deposed, Gone, LessRoom, Refused

STATUS_TIMEOUT_S = 3.0
THERE_S = 0.6  # in which a device answers that is there, and said to be away: others wait for what comes of that
TELL_S, STALL_S = 3.0, 120.0
LEAST_READ_BYTES = 16 << 20  # in STALL_S: no drive is slower
MOST_BEGUN = 64  # files that a device begins to read for one model

_Answer = TypeVar("_Answer")


class Failed(Exception):
    """A device did not do what it was ordered to: `event` says which, and why."""

    def __init__(self, event: Gone | Refused | LessRoom) -> None:
        super().__init__(str(event))
        self.event = event

    @property
    def refusal(self) -> Refused:
        """What happened, where the device was only asked whether it takes part: not now, whatever the reason."""
        if isinstance(self.event, Refused):
            return self.event
        why = self.event.error.message if isinstance(self.event, LessRoom) else self.event.why
        return Refused(self.event.node, why, is_for_now=True)


class StallWatch:
    """Tells whether a device that reads or fetches gets on: by `least_bytes` in STALL_S."""

    def __init__(self, least_bytes: int, done_bytes: int, now_s: float) -> None:
        self._least_bytes, self._since_bytes, self._since_s = least_bytes, done_bytes, now_s

    def note(self, done_bytes: int, now_s: float) -> bool:
        """It has come so far. Return whether it has stalled."""
        if done_bytes - self._since_bytes >= self._least_bytes:
            self._since_bytes, self._since_s = done_bytes, now_s
        return now_s - self._since_s > STALL_S


@dataclass(frozen=True, slots=True)
class _Reading:
    """How far a device is that reads files, one after the other.

    n_begun: how many it has begun.
    watch: of this one.
    """

    file: str
    read_bytes: int
    size_bytes: int
    n_begun: int
    watch: StallWatch


class RunOrders:
    """Gives orders to the devices of a run. Not thread-safe.

    holding: devices that opened the model, or a slice of it, and were not released.
    """

    def __init__(self, mesh: Mesh, check: Callable[[], None], say: Callable[[str], None] = lambda text: None) -> None:
        """check: runs while it waits for answers, and may raise to stop. say: is told what the user should see."""
        self._mesh, self._check, self._say = mesh, check, say
        self._failures: dict[str, Failed] = {}  # of devices that failed together with another one
        self._told_s = -math.inf
        self.holding: set[str] = set()

    def expect_release(self, nodes: Iterable[str]) -> None:
        """Note that `nodes` are about to open the model, so that `release` has them close it."""
        self.holding.update(nodes)

    def prepare(self, order: Document, nodes: AbstractSet[str], timeout_s: float) -> dict[str, Document]:
        """Have `nodes` open the model that `order` names, all at once; return what they say of it.

        A device that reads its file for the first time, to know whether it is the model, says how far it is, and is
        asked again until it is through. Raises Failed for the first that fails, or reads nothing for long; others that
        failed with it fail at once when they are asked the next time.
        """
        self._failures = {node: failed for node, failed in self._failures.items() if node in nodes}
        for node in self._failures:
            raise self._failures.pop(node)
        answers: dict[str, Document] = {}
        reading: dict[str, _Reading] = {}
        while waiting := nodes - answers.keys():
            self._check()
            found, self._failures = self.give_each(dict.fromkeys(waiting, order), timeout_s)
            for node in self._failures:
                raise self._failures.pop(node)
            for node, answer in found.items():
                how_far = judged(node, functools.partial(_reading_of, node, answer, reading.get(node)))
                if how_far is None:
                    answers[node] = answer
                else:
                    reading[node] = how_far
            self._tell({node: how_far for node, how_far in reading.items() if node not in answers})
        return answers

    def _tell(self, reading: Mapping[str, _Reading]) -> None:
        """Let the user know how far devices are, every few seconds."""
        if not reading or time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        names = names_apart(self._mesh.members())
        for node, one in reading.items():
            self._say(reading_words(names.get(node, node), one.file, one.read_bytes, one.size_bytes))

    def give(self, orders: Mapping[str, Document], timeout_s: float) -> dict[str, Document]:
        """Give each device its order, all at once; return the answers. Raises Failed for the first that fails.

        Where it is stopped, what devices still do is nobody's.
        """
        answers, failures = self.give_each(orders, timeout_s)
        for failure in failures.values():
            raise failure
        return answers

    def give_each(
        self, orders: Mapping[str, Document], timeout_s: float
    ) -> tuple[dict[str, Document], dict[str, Failed]]:
        """Give each device its order, all at once; return the answers, and what failed."""
        return self._give(orders, timeout_s, self._check)

    def _give(
        self, orders: Mapping[str, Document], timeout_s: float, check: Callable[[], None]
    ) -> tuple[dict[str, Document], dict[str, Failed]]:
        if not orders:
            return {}, {}
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
        finally:
            pool.shutdown(wait=False)
        answers, failures = dict[str, Document](), dict[str, Failed]()
        for node, call in calls.items():
            try:
                answers[node] = judged(node, call)
            except Failed as failed:
                failures[node] = failed
        return answers, failures

    def release(self, nodes: Collection[str] | None = None, *, is_awaited: bool = True) -> None:
        """Let all devices, or `nodes` of them, give up what they hold, as far as they are there and hear it.

        is_awaited: until they have, for a while. Else those that are there are told, and no more; the others count as
            holding it, as they may be there all the same.
        """
        chosen = self.holding if nodes is None else self.holding.intersection(nodes)
        freed = chosen & {member.node for member in self._mesh.members()}
        self.holding = self.holding - (chosen if is_awaited else freed)
        with contextlib.suppress(HasLeft):
            timeout_s = STATUS_TIMEOUT_S if is_awaited else 0.0
            self._give({node: {"order": "close"} for node in freed}, timeout_s, lambda: None)

    def who_is_stuck(self, nodes: Sequence[str]) -> Gone | Deposed:
        """Return which of `nodes` keeps the others waiting: one that does not answer, or else one that computes.

        Where this device has left, nobody obeys it, and none of them is to blame.
        """
        missing, computing = self._ask_what_they_do(nodes, STATUS_TIMEOUT_S)
        return missing or Gone((computing or list(nodes))[0], "it did not do its part in time")

    def who_is_missing(self, nodes: Sequence[str]) -> Gone | Deposed | None:
        """Return which of `nodes` does not answer, None where all do; where this device has left, that it has."""
        return self._ask_what_they_do(nodes, THERE_S)[0]

    def _ask_what_they_do(self, nodes: Sequence[str], timeout_s: float) -> tuple[Gone | Deposed | None, list[str]]:
        """Return who does not answer, as `who_is_missing`, and else who computes."""
        computing: list[str] = []
        for node in nodes:
            try:
                answer = self._mesh.order(node, {"order": "status"}, timeout_s=timeout_s)
                if Fields(answer, "its answer", node).words("place").startswith("computing"):
                    computing.append(node)
            except HasLeft as error:
                return Deposed(error.message), []
            except EdgeRunError as error:
                return Gone(node, error.message), []
        return None, computing


def reading_words(who: str, file: str, read_bytes: int, size_bytes: int) -> str:
    """Return how far a device is that reads a file for the first time."""
    done, size = format_size(read_bytes), format_size(size_bytes)
    return f"{who} reads {file} for the first time, to know it: {done} of {size}"


def _reading_of(node: str, answer: Document, before: _Reading | None) -> _Reading | None:
    """Return how far `node` is where it reads a file still. Raises ProtocolError, MeshError where it gets no further.

    before: how far it was the last time.
    """
    fields = Fields(answer, "its answer", node)
    if not fields.has("reading"):
        return None
    said = Fields(fields.table("reading"), "its answer, in reading", node)
    read_bytes, size_bytes = (said.integer(name, 0, MOST_BYTES) for name in ("read_bytes", "size_bytes"))
    file, now_s = said.words("file"), time.monotonic()
    if before is None or file != before.file or read_bytes < before.read_bytes:
        n_begun = before.n_begun + 1 if before else 1
        if n_begun > MOST_BEGUN:
            raise MeshError(f"it has begun to read {MOST_BEGUN} files for this model, and knows none of them")
        return _Reading(file, read_bytes, size_bytes, n_begun, StallWatch(LEAST_READ_BYTES, read_bytes, now_s))
    if before.watch.note(read_bytes, now_s):
        raise MeshError(f"it has read hardly anything of {file} for {STALL_S:.0f} s, at {format_size(read_bytes)}")
    return replace(before, read_bytes=read_bytes)


def judged(node: str, call: Callable[[], _Answer]) -> _Answer:
    """Return what `call`, which reads what `node` says, returns. Raises Failed where it refuses, or has no room.

    Raises HasLeft where this device gives no orders any more.
    """
    try:
        return call()
    except HasLeft:
        raise
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
