"""How likely tokens were, as APIs say it."""

from __future__ import annotations

import random
import time

from edge_run.runtime.server.logprobs import Letters, text_logprobs

LONGEST, WITHIN_S = 50_000, 5.0  # quadratic, it took half a minute
SPELT = (b"a", b"\xe2", b"\x82", b"\xac", b"b", b" \xe2", b"a")  # the second to the fourth are a character


def spell(token: int) -> bytes:
    return b"x" * (token % 7)


def test_a_token_is_where_those_before_it_end() -> None:
    tokens, letters = random.Random(0).choices(range(100), k=40), Letters()
    parts = [[((token, -1.0),) for token in part] for part in (tokens[:9], tokens[9:])]
    found = [text_logprobs(part, spell, letters) or {} for part in parts]
    offsets = [offset for one in found for offset in one["text_offset"]]
    assert offsets == [sum(token % 7 for token in tokens[:n]) for n in range(40)]


def test_tokens_that_are_parts_of_a_character_have_a_name_each_and_one_place() -> None:
    found = text_logprobs([((token, -1.0),) for token in range(7)], SPELT.__getitem__, Letters())
    assert found
    assert found["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "bytes: \\xe2", "a"]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3, 5]


def test_the_chosen_token_is_told_of_beside_the_likeliest() -> None:
    chosen, likeliest = (4, -3.0), [(1, -0.5), (0, -0.7), (2, -0.8), (6, -0.9)]
    found = text_logprobs([(chosen, *likeliest), (chosen,), ((1, -0.5), *likeliest)], SPELT.__getitem__, Letters())
    assert found
    named = {"bytes:\\xe2": -0.5, "a": -0.7, "bytes:\\x82": -0.8}
    assert found["top_logprobs"] == [{**named, "b": -3.0}, {"b": -3.0}, named]


def test_a_long_answer_takes_no_time() -> None:
    began_s = time.process_time()
    found = text_logprobs([((1, -1.0),)] * LONGEST, spell, Letters())
    assert time.process_time() - began_s < WITHIN_S
    assert found
    assert found["text_offset"][-1] == LONGEST - 1
