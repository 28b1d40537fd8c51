"""ConnectionSlots of a split server: who is silent makes room, and no address takes more than its share."""

from __future__ import annotations

import random

from edge_run.runtime.split.connection_slots import ConnectionSlot, ConnectionSlots


class Visitors:
    """Who has a slot, by name; time goes by one second with each of them."""

    def __init__(self, **limits: int) -> None:
        self.slots, self.inside, self.now_s = ConnectionSlots(**limits), {}, 0.0

    def come(self, name: str, address: str) -> ConnectionSlot | None:
        self.now_s += 1
        slot = self.slots.enter(address, lambda: self.inside.pop(name), self.now_s)
        if slot is not None:
            self.inside[name] = slot
        return slot


def test_who_is_silent_the_longest_makes_room_at_his_own_address_first() -> None:
    hall = Visitors(most=5, most_of_an_address=2)
    for name, address in (("a1", "1.1.1.1"), ("b1", "2.2.2.2"), ("a2", "1.1.1.1"), ("a3", "1.1.1.1")):
        assert hall.come(name, address)
    assert set(hall.inside) == {"b1", "a2", "a3"}
    hall.slots.answered(hall.inside["a2"], hall.now_s + 9)
    assert hall.come("a4", "1.1.1.1")
    assert set(hall.inside) == {"b1", "a2", "a4"}


def test_a_full_server_lets_newcomers_in_while_somebody_is_silent() -> None:
    hall = Visitors(most=4, most_of_an_address=4)
    for number in range(3):
        hall.come(f"a{number}", "1.1.1.1")
    hall.come("b", "2.2.2.2")
    assert hall.come("c", "3.3.3.3")
    assert set(hall.inside) == {"a1", "a2", "b", "c"}
    for slot in hall.inside.values():
        hall.slots.begin_answer(slot)
    assert hall.come("d", "4.4.4.4") is None
    hall.slots.leave(hall.inside.pop("a1"))
    assert hall.come("d", "4.4.4.4")


def test_who_reads_no_answers_makes_room_for_who_does() -> None:
    hall = Visitors(most_bytes=100)
    for name, address in (("a1", "1.1.1.1"), ("a2", "1.1.1.1"), ("b", "2.2.2.2")):
        slot = hall.come(name, address)
        assert slot
        hall.slots.hold(slot, 5)
        hall.slots.begin_answer(slot)
        hall.slots.begin_sending(slot, 45, hall.now_s)
    assert set(hall.inside) == {"a2", "b"}
    assert [slot.held_bytes for slot in hall.inside.values()] == [45, 45]
    hall.slots.answered(hall.inside["b"], hall.now_s)
    assert hall.inside["b"].held_bytes == 0


def test_memory_for_requests_is_bounded_and_taken_from_who_holds_the_most() -> None:
    hall = Visitors(most_bytes=100)
    for name, address, count in (("a1", "1.1.1.1", 40), ("b", "2.2.2.2", 30), ("a2", "1.1.1.1", 30)):
        slot = hall.come(name, address)
        assert slot
        hall.slots.hold(slot, count)
    hall.slots.hold(hall.inside["b"], 10)
    assert set(hall.inside) == {"b", "a2"}
    hall.inside["a2"].silent_since_s = hall.inside["b"].silent_since_s = None
    hall.slots.hold(hall.inside["b"], 31)
    assert set(hall.inside) == {"a2"}


def test_a_network_of_ipv6_is_one_address() -> None:
    hall = Visitors(most_of_an_address=1)
    hall.come("a", "2001:db8::1")
    hall.come("b", "2001:db8::ffff:2")
    hall.come("c", "2001:db8:0:1::1")
    hall.come("d", "::ffff:9.9.9.9")
    hall.come("e", "9.9.9.9")
    assert set(hall.inside) == {"b", "c", "e"}


def test_limits_hold_whatever_happens() -> None:
    chance = random.Random(4)
    hall = Visitors(most=8, most_of_an_address=3, most_bytes=500)
    for step in range(5000):
        names = list(hall.inside)
        act = chance.randrange(4)
        if act == 0 or not names:
            hall.come(str(step), f"10.0.0.{chance.randrange(5)}")
            continue
        slot = hall.inside[name := chance.choice(names)]
        if act == 1:
            hall.slots.hold(slot, chance.randrange(200))
        elif act == 2:
            slot.silent_since_s = None if chance.random() < 0.5 else slot.silent_since_s
        elif chance.random() < 0.5:
            hall.slots.answered(slot, hall.now_s)
        else:
            hall.slots.leave(hall.inside.pop(name))
        taken = list(hall.inside.values())
        assert sorted(map(id, taken)) == sorted(map(id, hall.slots._taken))
        assert len(taken) <= 8
        assert all(sum(one.address == other.address for one in taken) <= 3 for other in taken)
        assert sum(one.held_bytes for one in taken) <= 500
