"""Carries activations between the devices of a run over the data link: sends, waits and checks.

One thread of each device computes and receives. Several passes of a run may be in flight: then a device that waits for
the activation of one is told of the next ones meanwhile, and computes them in their order. Messages for a later pass
are kept until then; messages of another epoch, or of a pass that is over, are dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_run.base.error_codes import read_error
from edge_run.base.errors import Cancelled, DeviceLost, EdgeRunError, KernelError, MeshError, ProtocolError
from edge_run.base.fields import MOST_S, Document, Fields
from edge_run.base.mesh import Link, Message
from edge_run.base.protocols import Clock
from edge_run.runtime.decoding.driver import GraphChanged
from edge_run.runtime.mesh.activation_coding import ActivationCoder, decode
from edge_run.runtime.slices.slice import TAIL, Share

POLL_S = 0.1
MOST_WAITING, MOST_WAITING_BYTES = 256, 64 << 20  # messages for later; bytes, where a run's activations are not larger
SEND_TIMEOUT_S = 5.0
GRAPH_CHANGED = 100  # a code in what a device says that it failed over; those of other errors are their exit codes


class Overdue(DeviceLost):
    """The activation did not come in the time that a pass may take, though no device is known to be gone."""


class RunEnded(DeviceLost):
    """A device (`node`) has ended its part of the run, because it had lost touch with the coordinator."""


@dataclass(eq=False, repr=False, kw_only=True)
class Unreached(DeviceLost):
    """Another device, `teller`, does not reach `node`."""

    teller: str


@dataclass(eq=False, repr=False, kw_only=True)
class PassFailed(KernelError):
    """Another device (`node`) could not do its part of a pass; the cause is the error that it met.

    code: of what it met (`code_of`).
    number: of the command.
    teller: who says so, where that is another device's doing.
    """

    node: str
    code: int
    number: int
    teller: str = ""


def code_of(error: EdgeRunError) -> int:
    """Return what to call `error` among devices."""
    return GRAPH_CHANGED if isinstance(error, GraphChanged) else error.exit_code


class LinkTransport:
    """The `Transport` of one device, `node`, under one epoch.

    spent: what devices said that they were at work for in this pass, of those before this one in the ring.
    """

    def __init__(
        self,
        link: Link,
        epoch: int,
        share: Share,
        coder: ActivationCoder,
        check: Callable[[], None],
        most_waiting_bytes: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """Carry activations for the `share` of this device, as `coder` codes them.

        check: runs while it waits, and may raise to stop.
        most_waiting_bytes: of activations that came before they were asked for.
        """
        self.coder, self._link, self.epoch, self._clock = coder, link, epoch, clock
        self.node, self._owners = share.node, share.owners
        self._check, self._most_waiting_bytes = check, most_waiting_bytes
        self._waiting: deque[Message] = deque()
        self._deadline_s: float | None = None
        self.number = self.oldest = 0
        self.spent: dict[str, float] = {}
        self.place = "idle"
        self._round = 0
        self._since: float | None = None

    @property
    def hops(self) -> int:
        """How often an activation is handed on in a pass."""
        return sum(a != b for a, b in zip(self._owners, self._owners[1:], strict=False))

    def expect(self, number: int, deadline_s: float | None = None, oldest: int | None = None) -> None:
        """Command `number` begins, or the tail of its pass; activations of those before `oldest` are nobody's now.

        deadline_s: of each wait for an activation, None for no other than the link's own.
        oldest: the oldest pass in flight, None for that of `number`.
        """
        self.number, self._round, self._deadline_s, self.spent = number, 0, deadline_s, {}
        self.oldest = max(self.oldest, number if oldest is None else oldest)
        self._since = self._clock() if self._owners[0] == self.node else None
        self._waiting = deque(m for m in self._waiting if _is_at_least(m, self.oldest))

    def hear(self) -> None:
        """Take in what has come already. Raises DeviceLost for a device of this run that is known to be gone."""
        while (message := self._next(0.0)) is not None:
            self._keep(message)

    def forget(self) -> None:
        """What came before this epoch is nobody's, nor what will come of others than the devices of this run.

        Also the loss of an earlier life of who coordinates now.
        """
        self._link.take_only(self._is_ours)
        _drop_what_came(self._link)

    def begin(self) -> None:
        """A pass through the graph begins. Raises what `check` does."""
        self._check()
        self._round += 1

    def receive(self, unit: int, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Wait for the activation at the start of `unit`, of parts of `sizes` bytes.

        Raises DeviceLost, PassFailed, Cancelled, or ProtocolError, which names who sent what cannot be.
        """
        return _decoded(self._wait_for(unit), sizes)

    def await_tail(self) -> None:
        """Wait until the pass that is expected has come to its tail, of which nothing is wanted; as `receive`."""
        self._round = 1
        self._wait_for(len(self._owners) - 1)

    def _wait_for(self, unit: int) -> Message:
        """Return the activation at the start of `unit`, as it came."""
        self._leave()
        self.place = f"waiting for the activation before unit {unit}"
        started = self._clock()
        while True:
            message = self._take_waiting(lambda m: self._is_the_activation(m, unit)) or self._next(POLL_S)
            if message is not None and self._is_the_activation(message, unit):
                self._note(_fields(message))
                self._since = self._clock()
                self.place = f"computing from unit {unit}"
                return message
            if message is not None:
                self._keep(message)
            self._check()  # also while messages come without end
            if self._deadline_s is not None and self._clock() - started > self._deadline_s:
                raise Overdue(f"the activation before unit {unit} did not come in {self._deadline_s:.0f} s")

    def send(self, unit: int, node: str, parts: Sequence[memoryview]) -> None:
        """Hand an activation over. Raises DeviceLost when it cannot be."""
        self._leave()
        node = self._owners[-1] if node == TAIL else node
        codes, coded = self.coder.encode(node, parts)
        header: Document = {
            "kind": "activation",
            "epoch": self.epoch,
            "number": self.number,
            "round": self._round,
            "unit": unit,
            "spent": dict(self.spent),
            "codes": codes,
        }
        with _checked(self._check):
            self._link.send(node, header, coded, timeout_s=SEND_TIMEOUT_S)
        self.place = f"has sent the activation before unit {unit}"

    def finish(self) -> None:
        """The command is done."""
        self._leave()
        self.place = "idle"

    def command(self, timeout_s: float) -> Message | None:
        """Return the coordinator's next command or stop under this epoch, None when none came in time."""
        if (kept := self._take_waiting(lambda m: m.header.get("kind") != "activation")) is not None:
            return kept
        if (message := self._next(timeout_s)) is None:
            return None
        if message.header.get("kind") == "activation":
            self._keep(message)
            return None
        return message if self._is_ours(message) and message.node == self._owners[0] else None

    def _is_ours(self, item: Message | DeviceLost) -> bool:
        """Return whether what came is of a device of this run, and of this epoch; also on a thread of the link's."""
        return item.node in self._owners and (isinstance(item, DeviceLost) or item.header.get("epoch") == self.epoch)

    def _next(self, timeout_s: float) -> Message | None:
        """Return the next message, None when none came in time. Raises DeviceLost for a device of this run."""
        with _checked(self._check):
            try:
                return self._link.receive(timeout_s=timeout_s)
            except DeviceLost as error:
                if error.node in self._owners:
                    raise
                return None  # of an earlier plan, whose loss is known

    def _leave(self) -> None:
        """This device was at work up to now."""
        if self._since is not None:
            self.spent[self.node] = self.spent.get(self.node, 0.0) + self._clock() - self._since
            self._since = None

    def _note(self, fields: Fields) -> None:
        for node, seconds in fields.numbers("spent", 0.0, MOST_S).items():
            if node in self._owners and node != self.node:
                self.spent[node] = max(self.spent.get(node, 0.0), seconds)

    def _take_waiting(self, is_wanted: Callable[[Message], bool]) -> Message | None:
        """Return the first message that waits and is wanted, which waits no more."""
        found = next(filter(is_wanted, self._waiting), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _is_the_activation(self, message: Message, unit: int) -> bool:
        header = message.header
        wanted = ("activation", self.epoch, self.number, self._round, unit)
        found = tuple(header.get(key) for key in ("kind", "epoch", "number", "round", "unit"))
        return found == wanted and message.node == self._owners[unit - 1]

    def _keep(self, message: Message) -> None:
        """Keep what is for later; stop for what says that this pass will not end."""
        kind = message.header.get("kind")
        if not self._is_ours(message):
            return
        fields = _fields(message)
        if kind == "over":
            raise RunEnded("had lost touch with this device, and ended its part", node=message.node)
        number = fields.integer("number")
        if kind == "failed":
            if self.node != self._owners[0]:
                raise ProtocolError("says here that it failed: that is for the coordinator", node=message.node)
            if number >= self.oldest:
                raise _failure(self._owners, message.node, fields)
            return
        if number < self.oldest or not (kind == "activation" or message.node == self._owners[0]):
            return
        waiting = (message, *self._waiting)
        if len(waiting) > MOST_WAITING or sum(map(_size_of, waiting)) > self._most_waiting_bytes:
            node = _who_has_most(waiting, is_by_number=len(waiting) > MOST_WAITING)
            raise ProtocolError(f"{len(waiting) - 1} messages wait that nobody asked for, most of them its", node=node)
        self._waiting.append(message)
        if kind == "command":
            self.oldest = max(self.oldest, fields.integer("oldest", most=number))
        if self.oldest > self.number or (kind == "stop" and number == self.number):
            raise Cancelled("the pass is over: its coordinator stopped it, or goes on with another")


def _drop_what_came(link: Link) -> None:
    while True:
        try:
            if link.receive(timeout_s=0.0) is None:
                return
        except MeshError as error:
            if not isinstance(error, DeviceLost):
                return  # nothing comes any more: this device computes alone


@contextlib.contextmanager
def _checked(check: Callable[[], None]) -> Iterator[None]:
    """Where the link itself ends in the block, let `check` say what that means, before its error does."""
    try:
        yield
    except DeviceLost:
        raise
    except MeshError:
        check()
        raise


def _size_of(message: Message) -> int:
    return sum(part.nbytes for part in message.parts)


def _who_has_most(messages: Sequence[Message], *, is_by_number: bool) -> str:
    """Return who sent the most of `messages`: by their number, or by their bytes."""
    taken = Counter[str]()
    for message in messages:
        taken[message.node] += 1 if is_by_number else _size_of(message)
    return max(taken, key=taken.__getitem__)


def _fields(message: Message) -> Fields:
    return Fields(message.header, "a message", message.node)


def _failure(owners: Sequence[str], teller: str, fields: Fields) -> DeviceLost | PassFailed:
    """Return what a device says that it failed over: its own doing, or that of another one."""
    met, number, others = read_error(fields), fields.integer("number"), {*owners} - {owners[0]}
    lost, blamed = (fields.name(name) if fields.has(name) else "" for name in ("lost", "blames"))
    if lost in others and lost != teller:
        return Unreached(met.message, node=lost, teller=teller)
    code = fields.integer("code")
    if blamed in others and blamed != teller:
        return PassFailed(met.message, node=blamed, code=code, number=number, teller=teller)
    failed = PassFailed(met.message, node=teller, code=code, number=number)
    failed.__cause__ = met
    return failed


def _decoded(message: Message, sizes: Sequence[int]) -> list[memoryview]:
    try:
        return decode(message.header.get("codes"), message.parts, sizes)
    except ProtocolError as error:
        error.node = message.node
        raise


def _is_at_least(message: Message, number: int) -> bool:
    """Return whether `message` belongs to command `number` or a later one; what is no activation is kept."""
    found = message.header.get("number")
    return message.header.get("kind") != "activation" or (isinstance(found, int) and found >= number)
