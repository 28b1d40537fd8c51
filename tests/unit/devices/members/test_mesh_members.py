"""The signed list of members: who may change it, what is refused, which of two lists is the newer."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable

import pytest

from edge_run.base.errors import NotTrusted, ProtocolError
from edge_run.devices.members.join_request import REQUEST_AGE_S, JoinRequest, ask, read_request
from edge_run.devices.members.keys import DeviceKey, seal
from edge_run.devices.members.list_changes import ListEditor, found, secret_of, take_over
from edge_run.devices.members.member_list import (
    MOST_FOUNDERS,
    MOST_INVITATIONS,
    MOST_NUMBER,
    Invitation,
    ListedMember,
    MemberList,
    Role,
    canonical,
    read_list,
    signed,
)

CLUSTER, NOW_S = "abcdefgh", 1_800_000_000
SECRET = b"s" * 32


def key() -> DeviceKey:
    return DeviceKey(secrets.token_bytes(32))


def invitation(of: DeviceKey, uses: int = 1, role: Role = "use", expires_s: int = NOW_S + 60) -> Invitation:
    return Invitation(of.public_key, of.seal_key, role, uses, expires_s)


@dataclasses.dataclass
class Founded:
    """A cluster of a founder, and what it made of it."""

    founder: DeviceKey = dataclasses.field(default_factory=key)
    listed: MemberList = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.listed = found(self.founder, CLUSTER, "first", SECRET, runs_broker=True)

    def editor(self, device: DeviceKey | None = None, secret: bytes = SECRET) -> ListEditor:
        return ListEditor(device or self.founder, self.listed, secret)

    def add(self, name: str, role: Role = "use", by: DeviceKey | None = None) -> DeviceKey:
        guest, device = key(), key()
        self.listed = self.editor(by).invite(invitation(guest, role=role), NOW_S)
        self.listed = self.editor(by).admit(self.request(guest, device, name), NOW_S)
        return device

    def request(self, guest: DeviceKey, device: DeviceKey, name: str = "one", now_s: float = NOW_S) -> JoinRequest:
        payload = ask(guest, device, CLUSTER, name, now_s)
        return read_request(payload, CLUSTER, lambda key: self.listed.invitation(key) is not None)

    def read(self, payload: bytes | None = None) -> MemberList:
        return read_list(payload or self.listed.payload, CLUSTER, self.founder.public_key)


def test_a_list_is_read_as_it_was_written() -> None:
    cluster = Founded()
    second = cluster.add("second")
    cluster.add("third", "lead")
    read = cluster.read()
    assert read == cluster.listed
    assert [one.name for one in read.roll.members] == ["first", "second", "third"]
    assert secret_of(read, second) == SECRET
    with pytest.raises(NotTrusted, match="no secret"):
        secret_of(read, key())


def test_what_is_sealed_is_opened_by_its_receiver_only() -> None:
    one, other = key(), key()
    sealed = seal(one.seal_key, b"word", b"purpose")
    assert one.unseal(sealed, b"purpose") == b"word"
    for device, data, purpose in ((other, sealed, b"purpose"), (one, sealed, b"else"), (one, sealed[:-1], b"purpose")):
        with pytest.raises(NotTrusted):
            device.unseal(data, purpose)
    with pytest.raises(NotTrusted):
        seal(bytes(32), b"word", b"purpose")  # a point of which nothing secret can be made
    third = key()
    assert one.word_with(other.seal_key, b"x") == other.word_with(one.seal_key, b"x")
    assert one.word_with(other.seal_key, b"x") not in (
        one.word_with(third.seal_key, b"x"),
        one.word_with(other.seal_key, b"y"),
    )


def test_an_invitation_lets_in_as_many_as_it_says_and_while_it_lasts() -> None:
    cluster, guest = Founded(), key()
    cluster.listed = cluster.editor().invite(invitation(guest, uses=2), NOW_S)
    for name in ("one", "two"):
        cluster.listed = cluster.editor().admit(cluster.request(guest, key(), name), NOW_S)
    with pytest.raises(NotTrusted, match="used up"):
        cluster.editor().admit(cluster.request(guest, key()), NOW_S)
    late = key()
    cluster.listed = cluster.editor().invite(invitation(late, expires_s=NOW_S + 5), NOW_S)
    with pytest.raises(NotTrusted, match="has ended"):
        cluster.editor().admit(cluster.request(late, key(), now_s=NOW_S + 6), NOW_S + 6)
    with pytest.raises(NotTrusted, match="is not known"):
        cluster.request(key(), key())
    open_ = key()
    cluster.listed = cluster.editor().invite(invitation(open_), NOW_S)
    old = cluster.request(open_, key(), now_s=NOW_S - REQUEST_AGE_S - 1)
    with pytest.raises(NotTrusted, match="clock"):
        cluster.editor().admit(old, NOW_S)


def test_a_request_is_signed_by_the_invitation_and_by_the_device() -> None:
    cluster, guest, device = Founded(), key(), key()
    cluster.listed = cluster.editor().invite(invitation(guest), NOW_S)
    for words in (
        {"name": "another"},
        {"seal_key": json.loads(ask(guest, key(), CLUSTER, "one", NOW_S))["seal_key"]},
        {"invited": json.loads(ask(key(), device, CLUSTER, "one", NOW_S))["invited"]},
        {"time_s": NOW_S + 1},
    ):
        request = json.loads(ask(guest, device, CLUSTER, "one", NOW_S)) | words
        with pytest.raises(NotTrusted, match="did not sign"):
            read_request(canonical(request), CLUSTER, lambda _: True)
    with pytest.raises(NotTrusted):
        read_request(ask(guest, device, "another2", "one", NOW_S), CLUSTER, lambda _: True)


def test_who_was_removed_does_not_come_back_with_the_same_key() -> None:
    cluster, guest = Founded(), key()
    gone = cluster.add("gone")
    cluster.listed = cluster.editor().remove("gone")
    assert gone.public_key not in cluster.read().members
    assert gone.node not in cluster.listed.roll.secrets
    cluster.listed = cluster.editor().invite(invitation(guest), NOW_S)
    with pytest.raises(NotTrusted, match="was removed"):
        cluster.editor().admit(cluster.request(guest, gone), NOW_S)


def test_roles_are_kept() -> None:
    cluster = Founded()
    user, lead = cluster.add("user"), cluster.add("lead", "lead")
    cluster.add("other", "lead")
    with pytest.raises(NotTrusted, match="may not change it"):
        cluster.editor(user)
    assert cluster.add("by lead", by=lead)
    refused: list[Callable[[], MemberList]] = [
        lambda: cluster.editor(lead).change_role("user", "lead"),
        lambda: cluster.editor(lead).remove("other"),
        lambda: cluster.editor(lead).hand_on("user"),
        lambda: cluster.editor(lead).invite(invitation(key(), role="lead"), NOW_S),
    ]
    for change in refused:
        with pytest.raises(NotTrusted, match="founder"):
            change()
    for change in (lambda: cluster.editor(lead).remove("first"), lambda: cluster.editor().change_role("first", "use")):
        with pytest.raises(NotTrusted, match="founded"):
            change()
    with pytest.raises(NotTrusted, match="is no member"):
        cluster.editor().remove("nobody")


def test_a_lead_who_was_removed_signs_nothing_any_more() -> None:
    cluster = Founded()
    lead = cluster.add("lead", "lead")
    theirs = cluster.editor(lead)
    cluster.listed = cluster.editor().remove("lead")
    with pytest.raises(NotTrusted, match="may not change it"):
        cluster.editor(lead)
    for _ in range(5):  # what he goes on to sign on his own is older, however often he changes it
        theirs = ListEditor(lead, theirs.invite(invitation(key()), NOW_S), SECRET)
    assert theirs.listed.order < cluster.listed.order
    forged = signed(lead, cluster.listed.charter, cluster.listed.charter_signature, theirs.listed.roll)
    with pytest.raises(ProtocolError, match="members that lead, and the charter does not say so"):
        cluster.read(forged.payload)
    latest = dataclasses.replace(cluster.listed.roll, number=cluster.listed.roll.number + 1)
    forged = signed(lead, cluster.listed.charter, cluster.listed.charter_signature, latest)
    with pytest.raises(NotTrusted, match="is signed by a device that may not sign it"):
        cluster.read(forged.payload)


def test_a_cluster_is_handed_on() -> None:
    cluster = Founded()
    heir = cluster.add("heir")
    before = cluster.listed
    cluster.listed = cluster.editor().hand_on("heir")
    assert cluster.read().charter.founder == cluster.founder.public_key, "until the heir takes it"
    assert take_over(cluster.listed, cluster.founder) is None
    taken = take_over(cluster.listed, heir)
    assert taken is not None
    old, cluster.listed = ListEditor(cluster.founder, cluster.listed, SECRET), taken
    assert cluster.read().charter.founder == heir.public_key
    assert cluster.listed.order > before.order
    for _ in range(4):  # the old founder's own lists stay older
        old = ListEditor(cluster.founder, old.rotate(SECRET), SECRET)
    old = ListEditor(cluster.founder, old.remove("heir"), SECRET)
    assert old.listed.charter.heir == b"", "who is removed inherits nothing"
    assert old.listed.order < cluster.listed.order
    cluster.listed = cluster.editor(heir).remove("first")
    assert [one.name for one in cluster.read().roll.members] == ["heir"]
    founder = heir
    for number in range(MOST_FOUNDERS - 1):
        heir = cluster.add(f"heir {number}", by=founder)
        taken = take_over(cluster.editor(founder).hand_on(heir.node), heir)
        assert taken is not None
        founder, cluster.listed = heir, taken
        assert cluster.read() == taken
    cluster.add("one more", by=founder)
    with pytest.raises(NotTrusted, match=f"{MOST_FOUNDERS} times"):
        cluster.editor(founder).hand_on("one more")


def test_a_cluster_is_handed_on_to_who_is_away_whatever_changes_meanwhile() -> None:
    cluster = Founded()
    heir = cluster.add("heir")
    cluster.add("other")
    cluster.listed = cluster.editor().hand_on("heir")
    for change in (lambda: cluster.editor().change_role("other", "lead"), lambda: cluster.editor().rotate(SECRET)):
        cluster.listed = change()
        assert cluster.read().charter.heir == heir.public_key
    assert take_over(cluster.listed, heir) is not None
    by_lead = dataclasses.replace(cluster.listed.roll, members=cluster.listed.roll.members[:1])
    without = signed(cluster.founder, cluster.listed.charter, cluster.listed.charter_signature, by_lead)
    assert take_over(without, heir) is None, "who is no member makes no list that nobody can read"
    cluster.listed = cluster.editor().remove("heir")
    assert cluster.read().charter.heir == b""


def test_whoever_goes_or_may_less_has_no_line_that_is_of_use() -> None:
    cluster, guest = Founded(), key()
    cluster.add("gone")
    cluster.listed = cluster.editor().invite(invitation(guest, uses=16), NOW_S)
    cluster.listed = cluster.editor().change_role("gone", "lead")
    assert cluster.listed.invitation(guest.public_key), "who may more knows nothing that is of use"
    lead = cluster.add("lead", "lead")
    secret_line = key()
    cluster.listed = cluster.editor(lead).invite(invitation(secret_line), NOW_S)
    cluster.listed = cluster.editor().change_role("lead", "compute")
    assert not cluster.read().roll.invitations
    cluster.listed = cluster.editor().invite(invitation(guest, uses=16), NOW_S)
    cluster.listed = cluster.editor().remove("gone")
    with pytest.raises(NotTrusted, match="is not known"):
        cluster.request(guest, key(), "gone again")


def test_a_lead_cannot_keep_the_founder_from_changing_the_list() -> None:
    cluster = Founded()
    lead = cluster.add("lead", "lead")
    cluster.add("user")

    def sign(**changes: object) -> None:
        roll = dataclasses.replace(cluster.listed.roll, **changes)  # type: ignore[arg-type]
        cluster.listed = signed(lead, cluster.listed.charter, cluster.listed.charter_signature, roll)
        cluster.read()

    sign(number=MOST_NUMBER - 1, generation=MOST_NUMBER - 1)
    with pytest.raises(NotTrusted, match="founder"):
        cluster.editor(lead).rotate(SECRET)
    cluster.listed = cluster.editor().rotate(SECRET)
    assert cluster.read().roll.generation == 0
    first, *others = cluster.listed.roll.members
    sign(members=(dataclasses.replace(first, seal_key=lead.seal_key), *others), number=cluster.listed.roll.number + 1)
    cluster.listed = cluster.editor().rotate(b"n" * 32)
    assert cluster.read().members[cluster.founder.public_key].seal_key == cluster.founder.seal_key
    assert secret_of(cluster.listed, cluster.founder) == b"n" * 32
    many = tuple(invitation(key(), uses=number % 2) for number in range(MOST_INVITATIONS))
    sign(invitations=many, number=cluster.listed.roll.number + 1)
    cluster.listed = cluster.editor().invite(invitation(key()), NOW_S)
    assert len(cluster.read().roll.invitations) == MOST_INVITATIONS // 2 + 1, "what is used up makes room"
    sign(invitations=tuple(invitation(key()) for _ in many), number=cluster.listed.roll.number + 1)
    cluster.listed = cluster.editor().remove("lead")
    assert cluster.editor().invite(invitation(key()), NOW_S)


def test_no_list_is_made_that_nobody_reads() -> None:
    cluster = Founded()
    name = "\N{GRINNING FACE}" * 64
    members = [ListedMember(one.public_key, one.seal_key, name, "use") for one in (key() for _ in range(250))]
    roll = dataclasses.replace(
        cluster.listed.roll,
        members=(*cluster.listed.roll.members, *members),
        removed=(name,) * 256,
        secrets={one.node: bytes(80) for one in members},
    )
    cluster.listed = signed(cluster.founder, cluster.listed.charter, b"", roll)
    with pytest.raises(ProtocolError, match="at most"):
        cluster.editor().rotate(SECRET)


def test_an_id_comes_before_a_name() -> None:
    cluster = Founded()
    guest, one = key(), key()
    cluster.listed = cluster.editor().invite(invitation(guest, uses=3), NOW_S)
    other = key()
    for device, name in ((one, other.node), (other, one.node), (key(), "twice"), (key(), "twice")):
        if name == "twice" and not cluster.listed.roll.invitations[0].uses:
            cluster.listed = cluster.editor().invite(invitation(guest := key()), NOW_S)
        cluster.listed = cluster.editor().admit(cluster.request(guest, device, name), NOW_S)
    assert cluster.listed.find(one.node).key == one.public_key
    assert cluster.listed.find(other.node).key == other.public_key
    with pytest.raises(NotTrusted, match="more than one"):
        cluster.listed.find("twice")
    with pytest.raises(NotTrusted, match="is no member"):
        cluster.listed.find(one.node[:8])


def test_a_new_secret_is_for_members_only() -> None:
    cluster = Founded()
    second = cluster.add("second")
    cluster.listed = cluster.editor().rotate(b"n" * 32)
    assert secret_of(cluster.read(), second) == secret_of(cluster.read(), cluster.founder) == b"n" * 32
    third = key()
    guest = key()
    cluster.listed = cluster.editor(secret=b"n" * 32).invite(invitation(guest), NOW_S)
    cluster.listed = cluster.editor(secret=b"n" * 32).admit(cluster.request(guest, third), NOW_S)
    assert secret_of(cluster.read(), third) == b"n" * 32


def _at(document: dict[str, object], path: tuple[object, ...], value: object) -> bytes:
    place: object = document
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return canonical(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("roll", 2, 0, 3), "compute"),  # the founder's role
        (("roll", 2, 0, 2), "\x1b[31m"),
        (("roll", 2, 1, 3), "lead"),
        (("roll", 2, 1, 3), "owner"),
        (("roll", 1), -1),
        (("roll", 1), 1 << 60),
        (("roll", 1), True),
        (("roll", 1), 1.5),
        (("roll", 0), 9),
        (("roll", 3), ["x"] * 1000),
        (("roll", 6), {"x": "AAAA"}),
        (("roll",), []),
        (("charter", 1), 99),
        (("charter", 2), "AAAA"),
        (("charter", 3), ["A" * 44]),
        (("signature",), "A" * 88),
        (("handed",), [["A" * 44, "A" * 88]]),
        (("more",), 1),
    ],
)
def test_a_list_that_was_changed_is_refused(path: tuple[object, ...], value: object) -> None:
    cluster = Founded()
    cluster.add("second")
    with pytest.raises((ProtocolError, NotTrusted)):
        cluster.read(_at(json.loads(cluster.listed.payload), path, value))


def test_lists_of_others_noise_and_too_much_are_refused() -> None:
    cluster, other = Founded(), Founded()
    with pytest.raises(NotTrusted):
        cluster.read(other.listed.payload)
    with pytest.raises(ProtocolError):
        cluster.read(b"[" * 100_000)
    with pytest.raises(ProtocolError, match="at most"):
        cluster.read(b" " * 200_000)
    with pytest.raises(ProtocolError):
        cluster.read(cluster.listed.payload + b" ")


def test_the_largest_list_can_be_sent() -> None:
    cluster = Founded()
    members = [cluster.listed.roll.members[0]]
    members += [ListedMember(one.public_key, one.seal_key, "n" * 64, "use") for one in (key() for _ in range(255))]
    roll = dataclasses.replace(
        cluster.listed.roll,
        members=tuple(members),
        removed=tuple(f"{number:016}" for number in range(256)),
        invitations=tuple(invitation(key()) for _ in range(64)),
        secrets={one.node: seal(one.seal_key, SECRET, b"x") for one in members},
    )
    full = signed(cluster.founder, cluster.listed.charter, b"", roll)
    assert cluster.read(full.payload) == full
    guest = key()
    roll = dataclasses.replace(roll, invitations=(invitation(guest),))
    cluster.listed = signed(cluster.founder, full.charter, b"", roll)
    with pytest.raises(NotTrusted, match="one too many"):
        cluster.editor().admit(cluster.request(guest, key()), NOW_S)
