"""What a device does with messages that come while it waits for an activation, with several passes in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edge_run.base.errors import Cancelled, DeviceLost, ProtocolError
from edge_run.base.fields import Document
from edge_run.base.mesh import Message
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.transport import MOST_WAITING, LinkTransport, Overdue, PassFailed
from edge_run.runtime.slices.slice import TAIL, Share

OWNERS = ("a", "b", "c", "a")
PART = memoryview(bytes(range(64)))


class Link:
    """A link on which those messages come that a test puts there."""

    def __init__(self) -> None:
        self.items: deque[Message] = deque()
        self.is_wanted: Callable[[Message | DeviceLost], bool] = lambda item: True
        self.sent: list[tuple[str, Document]] = []

    def receive(self, **_: object) -> Message | None:
        return self.items.popleft() if self.items else None

    def take_only(self, is_wanted: Callable[[Message | DeviceLost], bool]) -> None:
        self.is_wanted = is_wanted

    def send(self, node: str, header: Document, *_: object, **__: object) -> None:
        self.sent.append((node, header))


class NothingMore(Exception):
    """Nothing more comes."""


def transport_of(node: str, owners: Sequence[str] = OWNERS) -> tuple[LinkTransport, Link]:
    link = Link()

    def stop() -> None:
        if link.items:
            return
        raise NothingMore

    return LinkTransport(link, 9, Share(owners, node), ActivationCoder("exact", {}), stop, 1 << 20), link  # type: ignore[arg-type]


def activation(number: int, unit: int) -> Message:
    header: Document = {"epoch": 9, "number": number, "round": 1, "unit": unit, "spent": {}, "codes": None}
    return Message(OWNERS[unit - 1], {"kind": "activation", **header}, (PART,))


def command(number: int, oldest: int) -> Message:
    return Message("a", {"kind": "command", "epoch": 9, "number": number, "oldest": oldest, "what": "decode"})


def waiting(number: int) -> tuple[LinkTransport, Link]:
    """Return the transport of `c` in command `number`, and its link."""
    transport, link = transport_of("c")
    link.items.append(command(number, number))
    assert transport.command(0.0) is not None
    transport.expect(number)
    transport._round = 1
    return transport, link


def test_commands_that_follow_wait_for_their_turn() -> None:
    transport, link = waiting(5)
    link.items += [command(6, 5), activation(6, 2), command(7, 5), activation(5, 2)]
    assert bytes(transport.receive(2, [64])[0]) == bytes(PART)
    for number in (6, 7):
        found = transport.command(0.0)
        assert found is not None
        assert found.header["number"] == number
        transport.expect(number)
        transport._round = 1
        if number == 6:
            assert bytes(transport.receive(2, [64])[0]) == bytes(PART), "it came before"
    assert transport.command(0.0) is None


def test_a_pass_is_over_when_the_oldest_in_flight_is_a_later_one() -> None:
    transport, link = waiting(5)
    link.items += [command(6, 5), command(8, 8)]
    with pytest.raises(Cancelled):
        transport.receive(2, [64])
    assert transport.oldest == 8, "so that 6 is not begun"
    link.items += [command(9, 10)]
    transport.expect(8)
    with pytest.raises(ProtocolError, match="oldest"):
        transport.receive(2, [64])


def test_a_stop_ends_its_own_pass_only() -> None:
    transport, link = waiting(5)
    link.items += [command(6, 5), Message("a", {"kind": "stop", "epoch": 9, "number": 6})]
    with pytest.raises(NothingMore):
        transport.receive(2, [64])
    link.items += [Message("a", {"kind": "stop", "epoch": 9, "number": 5})]
    with pytest.raises(Cancelled):
        transport.receive(2, [64])


def test_a_coordinator_hears_of_failures_of_all_passes_in_flight() -> None:
    transport, link = transport_of("a")
    failed: Document = {"kind": "failed", "epoch": 9, "code": 6, "error": "x", "figures": {}, "lost": "", "blames": ""}
    transport.expect(7, oldest=5)
    transport.expect(5)
    transport._round = 1
    link.items += [Message("b", {**failed, "number": 4})]
    with pytest.raises(NothingMore):
        transport.receive(3, [64])
    link.items += [Message("b", {**failed, "number": 6})]
    with pytest.raises(PassFailed) as found:
        transport.receive(3, [64])
    assert (found.value.node, found.value.number) == ("b", 6)


def test_what_is_for_the_tail_goes_to_its_owner_and_is_awaited() -> None:
    sender, sent = transport_of("c")
    sender.expect(5)
    sender.send(3, TAIL, [PART])
    assert sent.sent[0][0] == "a"
    transport, link = transport_of("a")
    transport.expect(6, oldest=5)
    transport.expect(5)
    link.items += [activation(6, 3), activation(5, 3)]
    transport.await_tail()
    transport.expect(6)
    transport.await_tail()
    with pytest.raises(NothingMore):
        transport.await_tail()


def test_only_what_is_of_the_run_is_taken_from_the_link() -> None:
    transport, link = transport_of("a")
    link.items.append(command(1, 1))
    transport.forget()
    assert not link.items
    assert link.is_wanted(activation(5, 2))
    assert link.is_wanted(DeviceLost("gone", node="c"))
    assert not link.is_wanted(DeviceLost("gone", node="stranger"))
    assert not link.is_wanted(Message("b", {"kind": "activation", "epoch": 8, "number": 5}))
    assert not link.is_wanted(Message("stranger", {"kind": "activation", "epoch": 9, "number": 5}))
    assert not link.is_wanted(Message("b", {}))


class Flood(Link):
    """A link on which messages of a pass that is over come without end, one each millisecond."""

    n_come = 0

    def receive(self, **_: object) -> Message:
        self.n_come += 1
        if self.n_come > 200:
            raise NothingMore
        return activation(0, 2)


def test_messages_that_nobody_waits_for_do_not_keep_a_pass_from_its_deadline() -> None:
    link, checks = Flood(), list[int]()
    share, coder = Share(OWNERS, "c"), ActivationCoder("exact", {})

    def check() -> None:
        checks.append(link.n_come)

    transport = LinkTransport(link, 9, share, coder, check, 1 << 20, lambda: link.n_come / 1e3)  # type: ignore[arg-type]
    transport.expect(5, deadline_s=0.1)
    with pytest.raises(Overdue):
        transport.receive(2, [64])
    assert len(checks) == link.n_come, "a pass that is stopped meanwhile ends too"


def test_of_too_many_messages_that_wait_who_sent_most_is_blamed() -> None:
    transport, link = transport_of("c", ("a", "b", "c", "d", "a"))
    transport.expect(5)
    transport._round = 1
    link.items += [replace(activation(10**6 + i, 4), node="d") for i in range(MOST_WAITING)]
    link.items.append(command(6, 5))
    with pytest.raises(ProtocolError) as found:
        transport.receive(2, [64])
    assert found.value.node == "d"
    assert not link.items, "the message that was too many came of another one"


def test_of_messages_that_are_too_large_together_who_sent_most_is_blamed() -> None:
    transport, link = transport_of("c", ("a", "b", "c", "d", "a"))
    transport.expect(5)
    transport._round = 1
    transport._most_waiting_bytes = 2 * PART.nbytes
    link.items += [replace(activation(10**6 + i, 4), node="d") for i in range(2)]
    link.items.append(activation(10**6 + 2, 1))
    with pytest.raises(ProtocolError) as found:
        transport.receive(2, [64])
    assert found.value.node == "d"
