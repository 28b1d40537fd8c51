"""A removal that another change of the list did not know of: who makes it again, and what it is dropped for."""

from __future__ import annotations

from random import Random

from edge_run.devices.members.cluster import Cluster
from edge_run.devices.members.identity import Identity
from edge_run.devices.members.keys import DeviceKey
from edge_run.devices.members.list_changes import ListEditor, found, take_over
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.members.roster import Roster
from mesh_lists import let_in

SECRET, NOW_S = b"s" * 32, 1.8e9
FOUNDER, LEAD, GONE, STAYS = (DeviceKey(bytes([number]) * 32) for number in range(1, 5))


def editor(device: DeviceKey, listed: MemberList) -> ListEditor:
    return ListEditor(device, listed, SECRET)


def roster_of(device: DeviceKey, listed: MemberList) -> Roster:
    identity = Identity(device.node, f"{int(NOW_S):012x}{0:08x}", True, device, b"", device)
    cluster = Cluster(listed.charter.cluster, SECRET, "mqtt://host", FOUNDER.public_key, listed)
    return Roster(identity, cluster, lambda: 0.0, lambda: NOW_S, Random(1))


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


def test_who_leads_or_is_to_found_is_removed_by_the_founder_only() -> None:
    """Nor does what another one signed, however old it looks, have the founder's device remove such a one."""
    base = of_four()
    for newer in (editor(FOUNDER, base).change_role("gone", "lead"), editor(FOUNDER, base).hand_on("gone")):
        removed = editor(LEAD, base).remove("gone")
        assert newer.order > removed.order
        for device in (FOUNDER, LEAD):
            assert editor(device, newer).remove_again(removed) is newer


def test_a_list_is_followed_though_nothing_could_be_removed_again() -> None:
    """Else what the device goes by, and what its program knows, would be two lists."""
    base = editor(FOUNDER, of_four())
    removed = editor(LEAD, base.listed).remove("gone")
    for newer in (base.hand_on("gone"), base.change_role("gone", "lead")):
        roster = roster_of(LEAD, base.listed)
        assert roster.take(removed.payload)
        assert roster.take(newer.payload)
        assert roster.listed == newer
        assert roster.listed.members.keys() == base.listed.members.keys()


def test_an_older_list_settles_nothing_though_its_removal_is_made_again() -> None:
    base = of_four()
    removed, rotated = editor(LEAD, base).remove("gone"), editor(FOUNDER, base).rotate(SECRET)
    older, newer = sorted((removed, rotated), key=lambda one: one.order)
    roster = roster_of(FOUNDER, newer)
    roster.connect()
    assert roster.take(older.payload) == (older is removed)
    assert not roster.is_settled
    assert [one.name for one in roster.listed.roll.members] == ["founder", "lead", "stays"]


def test_no_founder_is_removed_by_what_was_made_before_he_was_one() -> None:
    base = editor(FOUNDER, of_four()).change_role("stays", "lead")
    taken = take_over(editor(FOUNDER, base).hand_on("stays"), STAYS)
    assert taken is not None
    removed = editor(FOUNDER, base).remove("stays")
    for device in (FOUNDER, STAYS):
        assert editor(device, taken).remove_again(removed) is taken
