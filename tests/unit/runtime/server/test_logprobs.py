"""How likely tokens were, as APIs say it."""

from __future__ import annotations

import random
import time

from edge_run.runtime.server.logprobs import text_logprobs

LONGEST, WITHIN_S = 50_000, 5.0  # quadratic, it took half a minute


def spell(token: int) -> bytes:
    return b"x" * (token % 7)


def test_a_token_is_where_those_before_it_end() -> None:
    tokens = random.Random(0).choices(range(100), k=40)
    found = text_logprobs([((token, -1.0),) for token in tokens], spell, 5)
    assert found
    assert found["text_offset"] == [5 + sum(token % 7 for token in tokens[:n]) for n in range(40)]


def test_a_long_answer_takes_no_time() -> None:
    began_s = time.monotonic()
    found = text_logprobs([((1, -1.0),)] * LONGEST, spell)
    assert time.monotonic() - began_s < WITHIN_S
    assert found
    assert found["text_offset"][-1] == LONGEST - 1
