"""Events that nobody was told yet: as many as are of use, in their order."""

from __future__ import annotations

from edge_run.base.mesh import Joined, Lost, Member, MembersChanged, MeshEvent, Unled, add_event


def joined(node: str, number: int = 0) -> Joined:
    return Joined(Member(node, "x", "1", {"number": number}))


def after(*events: MeshEvent) -> list[MeshEvent]:
    waiting: list[MeshEvent] = []
    for event in events:
        add_event(waiting, event)
    return waiting


def test_of_a_member_only_its_latest_word_waits() -> None:
    assert after(joined("b", 1), joined("c"), joined("b", 2)) == [joined("c"), joined("b", 2)]
    assert after(joined("b"), joined("c"), Lost("b", "")) == [joined("c"), Lost("b", "")]


def test_who_was_started_anew_is_lost_first_and_then_there() -> None:
    assert after(joined("b", 1), Lost("b", ""), joined("b", 2)) == [Lost("b", ""), joined("b", 2)]


def test_another_list_is_told_once_and_each_end_of_a_lease() -> None:
    changed = MembersChanged()
    assert after(changed, Unled(1), changed, Unled(2)) == [changed, Unled(1), Unled(2)]
