"""How wide passes are while answers are made and prompts are read."""

from __future__ import annotations

import pytest

from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.llama.context_shape import RIDING_TOKENS
from edge_run.runtime.scheduling.widths import PART_TOKENS, PassWidths


def seen(read_s: float, token_s: float) -> PassWidths:
    """Passes that read for `read_s` and compute for `token_s` a token, of several widths."""
    widths = PassWidths(WidthCosts(), 512)
    for width in (1, 4, 16, 64, 128, 256, 512):
        for _ in range(3):
            compute_s = width * token_s
            wall_s = max(read_s, compute_s)
            widths.observe(width, wall_s, wall_s - compute_s, read_s, int(read_s * 1e9))
    return widths


def test_prompts_alone_have_the_widest_passes() -> None:
    assert PassWidths(WidthCosts(), 512).with_prompts(0) == 512


def test_before_anything_was_seen_a_prompt_gets_a_few_tokens() -> None:
    assert PassWidths(WidthCosts(), 512).with_prompts(4) == 4 + PART_TOKENS
    assert PassWidths(WidthCosts(), 8).with_prompts(4) == 8


@pytest.mark.parametrize("most", [1, 2, 8, 32, 64, 512])
@pytest.mark.parametrize("n_answers", [1, 2, 7, 8, 31, 32, 33, 200])
def test_a_prompt_gets_a_part_however_many_answers_there_are(most: int, n_answers: int) -> None:
    n_tokens = PassWidths(WidthCosts(), most).with_prompts(n_answers) - n_answers
    assert max(1, min(PART_TOKENS, most) // 4) <= n_tokens <= min(PART_TOKENS, most)


def test_tokens_of_prompts_ride_along_while_weights_are_read() -> None:
    assert seen(read_s=1.0, token_s=0.01).with_prompts(4) == 96
    assert seen(read_s=10.0, token_s=0.01).with_prompts(4) == 512
    assert seen(read_s=0.1, token_s=0.01).with_prompts(4) == 4 + PART_TOKENS  # with fewer a prompt would take too long


def test_answers_wait_longer_for_prompts_that_are_more_than_they() -> None:
    widths = seen(read_s=1.0, token_s=0.01)
    assert widths.with_prompts(4) == 96
    assert widths.with_prompts(4, are_few=True) == 128


def test_where_nothing_is_read_answers_keep_their_pace() -> None:
    assert seen(read_s=0.0, token_s=0.01).with_prompts(128) == 192


def test_a_prompt_gets_some_tokens_whatever_they_take() -> None:
    assert seen(read_s=0.0, token_s=0.01).with_prompts(2) == 2 + PART_TOKENS


def test_prompts_that_end_may_make_a_pass_longer_but_not_by_a_whole_one() -> None:
    widths = seen(read_s=0.4, token_s=0.01)
    assert widths.with_prompts(4) == 4 + PART_TOKENS  # of a long prompt: more would take longer than reading
    assert widths.may_end_prompts(4, 4 + 64)
    assert not widths.may_end_prompts(4, 4 + 72)
    assert not widths.may_end_prompts(4, 4 + RIDING_TOKENS)


def test_prompts_that_end_have_no_more_than_what_room_is_lent_beside() -> None:
    assert seen(read_s=10.0, token_s=0.01).may_end_prompts(4, 4 + RIDING_TOKENS)
    assert not seen(read_s=10.0, token_s=0.01).may_end_prompts(4, 5 + RIDING_TOKENS)


def test_before_anything_was_seen_no_pass_is_made_longer() -> None:
    assert not PassWidths(WidthCosts(), 512).may_end_prompts(4, 5)
