"""A removal that another change of the list did not know of: who makes it again, and what it is dropped for."""

from __future__ import annotations

from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.list_changes import ListEditor, found, take_over
from edge_run.devices.members.member_list import MemberList
from mesh_lists import let_in

SECRET, NOW_S = b"s" * 32, 1.8e9
FOUNDER, LEAD, GONE, STAYS = (DeviceKey(bytes([number]) * 32) for number in range(1, 5))


def editor(device: DeviceKey, listed: MemberList) -> ListEditor:
    return ListEditor(device, listed, SECRET)


def of_four() -> MemberList:
    listed = found(FOUNDER, "abcdefgh", "founder", SECRET, runs_broker=True)
    for name, device in (("lead", LEAD), ("gone", GONE), ("stays", STAYS)):
        listed = let_in(editor(FOUNDER, listed), device, name, NOW_S)
    return editor(FOUNDER, listed).change_role("lead", "lead")


def test_whoever_leads_makes_a_removal_again() -> None:
    base = of_four()
    for maker, other in ((FOUNDER, LEAD), (LEAD, FOUNDER)):
        removed, rotated = editor(maker, base).remove("gone"), editor(other, base).rotate(SECRET)
        for device in (FOUNDER, LEAD):
            again = editor(device, rotated).remove_again(removed)
            assert again.order > rotated.order
            assert [one.name for one in again.roll.members] == ["founder", "lead", "stays"]
            assert again.roll.removed == (GONE.node,)
            assert editor(device, again).remove_again(removed) is again, "once"
            assert editor(device, removed).remove_again(rotated) is removed


def test_not_for_who_leads_no_more() -> None:
    base = of_four()
    removed, without_lead = editor(LEAD, base).remove("gone"), editor(FOUNDER, base).change_role("lead", "use")
    assert editor(FOUNDER, without_lead).remove_again(removed) is without_lead


def test_that_of_a_device_that_leads_is_the_founders() -> None:
    base = of_four()
    removed, leading = editor(LEAD, base).remove("gone"), editor(FOUNDER, base).change_role("gone", "lead")
    assert editor(LEAD, leading).remove_again(removed) is leading
    again = editor(FOUNDER, leading).remove_again(removed)
    assert GONE.public_key not in {*again.members, *again.charter.leads}
    assert STAYS.public_key in again.members


def test_no_founder_is_removed_by_what_was_made_before_he_was_one() -> None:
    base = editor(FOUNDER, of_four()).change_role("stays", "lead")
    taken = take_over(editor(FOUNDER, base).hand_on("stays"), STAYS)
    assert taken is not None
    removed = editor(FOUNDER, base).remove("stays")
    for device in (FOUNDER, STAYS):
        assert editor(device, taken).remove_again(removed) is taken
