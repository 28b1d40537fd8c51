"""Who may say what at the embedded broker, and whose kept messages are forgotten."""

from __future__ import annotations

import pytest

from edge_run.devices.broker.access import covers, member_user, mosquitto_acl
from edge_run.devices.broker.kept import KeptMessages
from edge_run.devices.broker.packets import Publish
from edge_run.devices.messages.topics import ROOT

NODE, OTHER = "abcdefghijklmnop", "qrstuvwxyz234567"


@pytest.mark.parametrize(
    ("topic", "client", "may"),
    [
        (f"homeassistant/sensor/{NODE}/members/config", NODE, True),
        (f"homeassistant/binary_sensor/{NODE}/present/config", NODE, True),
        (f"edge/v1/c/home/{NODE}", NODE, True),
        (f"homeassistant/sensor/{OTHER}/members/config", NODE, False),
        (f"homeassistant/lock/{NODE}/x/config", NODE, False),
        (f"homeassistant/binary_sensor/{NODE}/x/config", NODE, False),
        (f"homeassistant/sensor/{NODE}/config", NODE, False),
        ("homeassistant/sensor/0x00158d0001/x/config", "0x00158d0001", False),
        ("homeassistant/sensor/%n/x/config", "0x00158d0001", False),
        ("homeassistant/status", NODE, False),
    ],
)
def test_a_member_shows_itself_to_home_assistant_and_nothing_else(topic: str, client: str, may: bool) -> None:
    """Whatever name its client has: others name their devices as they please."""
    assert member_user("c", "word").may_publish(topic, client) == may


def test_who_may_only_compute_leads_nobody() -> None:
    lead, computes = member_user("c", "word"), member_user("c", "word", leads=False)
    for topic in ("edge/v1/c/coord/lease", "edge/v1/c/plan/3", f"edge/v1/c/node/{OTHER}/cmd"):
        assert lead.may_publish(topic, NODE)
        assert not computes.may_publish(topic, NODE)
    for topic in ("edge/v1/c/members", f"edge/v1/c/node/{NODE}/rsp"):
        assert computes.may_publish(topic, NODE)


def test_mosquitto_knows_no_form_of_ids() -> None:
    assert "%n" not in mosquitto_acl("c", "edge")
    assert "pattern write homeassistant/sensor/%c/+/config" in mosquitto_acl("c", "edge").splitlines()
    assert covers("a/%n", f"a/{NODE}", NODE)


def test_nobody_has_forgotten_what_another_user_had_kept() -> None:
    kept = KeptMessages()
    kept.put("a", Publish("members", b"list", is_kept=True))
    kept.put("b", Publish("members", b"", is_kept=True))
    assert [one.payload for one in kept.matching("members")] == [b"list"]
    kept.put("a", Publish("members", b"", is_kept=True))
    assert not len(kept)


def test_who_leads_has_the_plan_forgotten_of_who_led_before() -> None:
    kept = KeptMessages()
    for epoch, user in enumerate("abab"):
        kept.put(user, Publish(f"{ROOT}/c/plan/{epoch - 1}", b"", is_kept=True))
        kept.put(user, Publish(f"{ROOT}/c/plan/{epoch}", b"plan", is_kept=True))
    assert [one.topic for one in kept.matching("#")] == [f"{ROOT}/c/plan/3"]


def test_a_member_may_ask_to_come_in_once_more() -> None:
    """Its files may be lost, and its line used up."""
    topic = "edge/v1/c/join/" + "a" * 64
    assert member_user("c", "word").may_publish(topic, "a" * 64)
    assert not member_user("c", "word").may_publish(topic, "b" * 64)
