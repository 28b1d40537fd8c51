"""Which turns go where a conversation has no room."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edge_run.base.errors import ContextFull
from edge_run.base.units import MIB
from edge_run.runtime.generation.chat import leave_out_oldest, without_oldest

CONTEXT = 100


def count(messages: Sequence[Any]) -> int:
    return sum(len(message["content"]) for message in messages)


def said(role: str, n_tokens: int) -> dict[str, str]:
    return {"role": role, "content": "a" * n_tokens}


def talk(*turn_tokens: int) -> list[dict[str, str]]:
    turns = [[said("user", n - 1), said("assistant", 1)] for n in turn_tokens[:-1]]
    return [said("system", 5), *(one for turn in turns for one in turn), said("user", turn_tokens[-1])]


def test_what_has_room_stays_whole() -> None:
    messages = talk(40, 30, 13)
    assert leave_out_oldest(messages, CONTEXT, count) is messages
    assert leave_out_oldest(talk(40, 30, 24), CONTEXT, count, max_tokens=1) == talk(40, 30, 24)


def test_where_an_answer_has_no_room_half_of_the_context_stays() -> None:
    assert leave_out_oldest(talk(40, 30, 14), CONTEXT, count) == talk(30, 14)
    assert leave_out_oldest(talk(10, 10, 30, 10, 30), CONTEXT, count) == talk(10, 30)


def test_the_last_turn_stays_however_long() -> None:
    assert leave_out_oldest(talk(20, 400), CONTEXT, count) == talk(400)
    assert without_oldest(talk(400), CONTEXT, count) == talk(400)
    assert without_oldest(talk(3, 4), CONTEXT, count) == talk(4)
    assert without_oldest([], CONTEXT, count) == []


def test_what_is_clearly_too_long_need_not_be_counted() -> None:
    def count_or_raise(messages: Sequence[Any]) -> int:
        if count(messages) > CONTEXT:
            raise ContextFull("clearly too long")
        return count(messages)

    for one in (talk(40, 30, 14), talk(20, 400), talk(60, 60, 60, 10), talk(40, 30, 13), talk(400)):
        assert leave_out_oldest(one, CONTEXT, count_or_raise) == leave_out_oldest(one, CONTEXT, count)


def test_one_shortened_conversation_is_made_at_a_time() -> None:
    messages = [said("user", 1) for _ in range(5_000)]
    tracemalloc.start()
    try:
        kept = without_oldest(messages, CONTEXT, count)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == CONTEXT // 2
    assert peak_bytes < MIB, "all of them are 100 MB"


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "developer"]), st.integers(0, 60))),
    st.integers(1, 200) | st.none(),
)
def test_what_is_left_is_the_end_of_the_conversation_and_all_the_system_said(
    told: list[tuple[str, int]], max_tokens: int | None
) -> None:
    messages = [said(role, n) for role, n in told]
    kept = leave_out_oldest(messages, CONTEXT, count, max_tokens)
    system = [one for one in messages if one["role"] in ("system", "developer")]
    assert [one for one in kept if one["role"] in ("system", "developer")] == system
    begins = [i for i, one in enumerate(messages) if one["role"] == "user"]
    if not begins:
        assert kept == messages
        return
    last = len(messages) - begins[-1]
    assert list(kept[len(kept) - last :]) == messages[begins[-1] :]
    assert list(kept[: begins[0]]) == messages[: begins[0]]
    if len(kept) < len(messages):
        assert count(kept) <= CONTEXT // 2 or sum(one["role"] == "user" for one in kept) == 1
