"""Which tokens a full context lets go, and when: those that llama.cpp's server takes out of it."""

from __future__ import annotations

import pytest

from edge_run.runtime.decoding.context_shift import WHOLE_PROMPT, ContextShift

CONTEXT = 256


class Decoder:
    """Has nothing to shift."""

    def shift(self, position: int, n_tokens: int) -> None:
        raise AssertionError("only planned")

    def clear(self) -> None:
        raise AssertionError("only planned")


def planned(keep: int, prompt_tokens: int, all_tokens: int, *, adds_bos: bool = False) -> tuple[int, int]:
    return ContextShift(Decoder(), keep, CONTEXT, adds_bos=adds_bos).plan_shift(prompt_tokens, all_tokens)


@pytest.mark.parametrize(
    ("keep", "prompt_tokens", "adds_bos", "wanted"),
    [
        (0, 1, False, (0, 127)),
        (0, 1, True, (1, 127)),
        (4, 100, False, (4, 125)),
        (4, 100, True, (5, 125)),
        (4, 2, True, (5, 125)),  # also beyond the prompt
        (WHOLE_PROMPT, 100, False, (100, 77)),
        (WHOLE_PROMPT, 100, True, (101, 77)),
        (WHOLE_PROMPT, 255, True, (252, 1)),
        (10**6, 100, False, (252, 1)),
    ],
)
def test_what_goes(keep: int, prompt_tokens: int, adds_bos: bool, wanted: tuple[int, int]) -> None:
    assert planned(keep, prompt_tokens, CONTEXT - 1, adds_bos=adds_bos) == wanted


def test_tokens_go_before_the_last_cell_is_used() -> None:
    assert [planned(4, 100, n_tokens)[1] for n_tokens in range(CONTEXT - 4, CONTEXT + 1)] == [0, 0, 0, 125, 126]
