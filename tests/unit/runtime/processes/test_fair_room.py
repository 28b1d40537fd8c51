"""FairRoom: never more than there is, and no key stops another."""

from __future__ import annotations

import math
import random

import anyio
import anyio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from edge_run.runtime.processes.fair_room import FairRoom


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6), st.booleans()), max_size=12))
def test_no_more_is_held_than_there_is_and_everybody_has_a_turn(units: int, asked: list[tuple[str, int, bool]]) -> None:
    async def main() -> None:
        room, held, done, numbers = FairRoom(units), 0, 0, random.Random(7)

        async def task(key: str, wanted: int, scope: anyio.CancelScope) -> None:
            nonlocal held, done
            with scope:
                async with room.held(key, wanted):
                    held += min(wanted, units)
                    assert held <= units
                    try:
                        for _ in range(numbers.randrange(4)):
                            await anyio.lowlevel.checkpoint()
                    finally:
                        held -= min(wanted, units)
            done += 1

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for key, wanted, leaves in asked:
                    scope = anyio.CancelScope()
                    group.start_soon(task, key, wanted, scope)
                    await anyio.lowlevel.checkpoint()
                    if leaves:
                        scope.cancel()
        assert (held, done, room.n_waiting()) == (0, len(asked), 0)
        async with room.held("c", units):
            pass

    anyio.run(main)


def test_the_key_that_holds_least_is_next_and_of_equal_ones_that_which_waited_longest() -> None:
    async def main() -> None:
        room, order = FairRoom(2), list[str]()

        async def task(key: str, priority: int = 0) -> None:
            async with room.held(key, priority=priority):
                order.append(key)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            for key in ("a",) * 6 + ("b",) * 2:
                group.start_soon(task, key)
                await anyio.lowlevel.checkpoint()
            assert (room.n_waiting(), room.n_waiting("b"), room.waiting_keys) == (6, 2, {"a", "b"})
            group.start_soon(task, "urgent", 1)
        assert order[:4] == ["a", "a", "urgent", "b"]

    anyio.run(main)


def test_who_waits_long_comes_before_higher_priorities() -> None:
    async def main(aging_s: float) -> list[str]:
        now_s, order = 0.0, list[str]()
        room = FairRoom(1, aging_s, lambda: now_s)

        async def task(name: str, priority: int) -> None:
            async with room.held(name[0], priority=priority):
                order.append(name)

        async with anyio.create_task_group() as group, room.held("first"):
            for name, priority in (("low", 0), ("high 1", 1)):
                group.start_soon(task, name, priority)
                await anyio.lowlevel.checkpoint()
            now_s = 59.0
            group.start_soon(task, "high 2", 1)
            await anyio.lowlevel.checkpoint()
        return order

    assert anyio.run(main, 30.0) == ["high 1", "low", "high 2"]
    assert anyio.run(main, math.inf) == ["high 1", "high 2", "low"]


def test_who_has_no_patience_goes_on_without() -> None:
    async def main() -> None:
        room = FairRoom(1)
        async with room.held("a"):
            with anyio.fail_after(60):
                async with room.held("b", patience_s=0.01) as is_held:
                    assert not room.n_waiting()
                    assert not is_held
        async with room.held("c") as is_held:
            assert is_held

    anyio.run(main)
