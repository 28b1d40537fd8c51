"""Whom a split server serves: who is silent makes room, no address has more than its share, no frame is for nobody."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edge_run.runtime.split.admission import LEAST_SILENCE_S, ConnectionSlot, ConnectionSlots, FrameQueue, NoSlot


class Visitors:
    """Who has a slot, by name; time goes by one second with each of them."""

    def __init__(self, **limits: int) -> None:
        self.slots, self.inside, self.now_s = ConnectionSlots(least_silence_s=0.0, **limits), {}, 0.0

    def come(self, name: str, address: str) -> ConnectionSlot | None:
        self.now_s += 1
        try:
            slot = self.slots.enter(address, lambda: self.inside.pop(name), self.now_s)
        except NoSlot:
            return None
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


def test_who_is_silent_for_a_while_as_every_device_is_makes_no_room() -> None:
    """Else devices would send each other away for ever."""
    slots, gone = ConnectionSlots(most=4, most_of_an_address=2), list[str]()
    for name, address in (("a1", "1.1.1.1"), ("a2", "1.1.1.1"), ("b1", "2.2.2.2"), ("b2", "2.2.2.2")):
        slots.enter(address, lambda name=name: gone.append(name), 0.0)  # type: ignore[misc]
    for address, why in (
        ("1.1.1.1", "2 connections from this address, its most"),
        ("3.3.3.3", "4 connections, its most"),
    ):
        with pytest.raises(NoSlot, match=f"it has {why}, and a device takes two"):
            slots.enter(address, lambda: None, LEAST_SILENCE_S)
    assert not gone
    assert slots.enter("1.1.1.1", lambda: None, LEAST_SILENCE_S + 0.1)
    assert gone == ["a1"]


def test_a_machine_without_room_for_another_one_loses_who_has_been_silent_the_longest() -> None:
    slots, gone = ConnectionSlots(), list[str]()
    for name, came_s in (("late", 2.0), ("early", 1.0)):
        slots.enter("1.1.1.1", lambda name=name: gone.append(name), came_s)  # type: ignore[misc]
    slots.make_room()
    assert gone == ["early"]


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


def always() -> bool:
    return True


def never() -> bool:
    return False


def answered(until_s: float, every_s: float, takes_s: float, patience_s: float) -> tuple[int, int]:
    """Return how many frames come until then, one `every_s`, and how many are done while their devices wait."""
    queue, waiting, done_s, n_came, n_in_time = FrameQueue(), [], 0.0, 0, 0
    queue.took("code", takes_s)
    now, at_work = 0, None
    while (now_s := now / 100) < until_s:
        if at_work is not None and now_s >= done_s:
            n_in_time += now_s <= at_work.until_s
            queue.leave(at_work)
            at_work = None
        if now % round(100 * every_s) == 0:
            n_came += 1
            frame = queue.come("code", now_s + patience_s, never)
            if queue.refusal(frame, now_s):
                queue.leave(frame)
            else:
                waiting.append(frame)
        while at_work is None and waiting:
            frame = waiting.pop(0)
            if queue.refusal(frame, now_s):
                queue.leave(frame)
            else:
                queue.begin(frame, now_s)
                at_work, done_s = frame, now_s + takes_s
        now += 1
    return n_came, n_in_time


@pytest.mark.parametrize("every_s", [0.2, 0.11, 0.05, 0.02])
def test_a_server_with_too_much_to_do_does_what_it_can(every_s: float) -> None:
    """Each second it can compute ten frames, and devices wait half a second for each."""
    n_came, n_in_time = answered(60.0, every_s, 0.1, 0.5)
    assert n_in_time >= 0.85 * min(n_came, 600)


@pytest.mark.parametrize(("until_s", "is_gone"), [(1.0, never), (9.0, always)])
def test_frames_for_nobody_make_nobody_wait(until_s: float, is_gone: Callable[[], bool]) -> None:
    queue = FrameQueue()
    queue.took("code", 0.5)
    first = queue.come("code", 9.0, never)
    queue.begin(first, 0.0)
    queue.come("code", until_s, is_gone)
    assert queue.wait_s(0.2) == pytest.approx(0.3 if is_gone() else 0.8)
    assert queue.wait_s(1.1) == 0.0
    last = queue.come("code", 9.0, never)
    assert queue.wait_s(1.1, last) == 0.0
    assert queue.refusal(last, 1.1) == ""


def test_a_frame_that_cannot_be_done_in_time_is_refused_at_once() -> None:
    queue = FrameQueue()
    queue.took("code", 0.5)
    queue.begin(queue.come("code", 9.0, never), 0.0)
    second = queue.come("code", 1.2, never)
    assert queue.refusal(second, 0.0) == ""
    third = queue.come("code", 1.2, never)
    assert queue.refusal(third, 0.0) == (
        "busy: 1 s of other frames come first, and 1.2 s are left of the time for this one"
    )
    assert queue.refusal(second, 1.2).startswith("busy: ")


def test_what_a_server_thinks_that_a_frame_takes_does_not_keep_it_from_all_of_them() -> None:
    queue = FrameQueue()
    queue.took("code", 100.0)
    only = queue.come("code", 1.0, never)
    assert queue.refusal(only, 0.0) == ""
    queue.begin(only, 0.0)
    queue.leave(only)
    for _ in range(2):
        queue.took("code", 0.1)
    assert queue.usual_s("code") == 0.1
