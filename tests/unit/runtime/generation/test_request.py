"""What is asked of a model: refused at once where it cannot be, and less by the time that it waited."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.request import Request, Turn, chat_request, text_request


def test_one_mark_may_be_given_as_text() -> None:
    assert Request("Once", marks="<think>").marks == ("<think>",)
    assert Request("Once", marks=["<a>", "<b>"]).marks == ("<a>", "<b>")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Request, {"prompt": "Once", "marks": [1]}, "mark 1: must be text"),
        (Request, {"prompt": np.array(5)}, "prompt array"),
        (Request, {"prompt": "Once", "on_read": 1}, "on read 1: must be a function or None"),
        (Turn, {"priority": "x"}, "priority 'x': must be a whole number"),
        (Turn, {"deadline_s": "5"}, "deadline s '5': must be a number or None"),
        (Turn, {"key": None}, "key None: must be text"),
        (SamplingConfig, {"stop": [1]}, "stop string 1: must be text"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert message in str(caught.value)


def test_what_a_prompt_must_be_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Request(5)  # type: ignore[arg-type]
    assert str(caught.value) == "prompt 5: must be text or a list"


def test_a_deadline_may_be_said_without_a_turn() -> None:
    assert text_request("Once", deadline_s=5).turn == Turn(deadline_s=5)
    assert text_request("Once", turn=Turn(key="a", deadline_s=2)).turn == Turn(key="a", deadline_s=2)
    with pytest.raises(ConfigError, match="deadline 0: must be more than 0 seconds"):
        text_request("Once", deadline_s=0)


def test_a_text_has_no_oldest_turns() -> None:
    """They were left where they are, and nothing was said."""
    with pytest.raises(ConfigError, match="drops oldest: leaves out turns of a conversation"):
        text_request("Once", drops_oldest=True)
    assert not text_request("Once", drops_oldest=False).drops_oldest
    assert chat_request([{"role": "user", "content": "Hi"}], drops_oldest=True).drops_oldest


def test_an_option_that_is_misspelled_is_told_what_all_of_a_request_are_called() -> None:
    with pytest.raises(ConfigError, match=r"unknown \(is it max_tokens\?\); known are max_tokens, sampling"):
        text_request("Once", n_predict=5)


def test_a_request_whose_time_is_over_needs_no_grammar() -> None:
    request = Request("Once", sampling=SamplingConfig(grammar='root ::= "a"'), turn=Turn(deadline_s=5))
    assert request.after(2).turn.deadline_s == 3
    assert request.after(2).sampling.grammar
    for waited_s in (5, math.inf):
        late = request.after(waited_s)
        assert late.sampling.grammar is None
        now_s = time.monotonic()
        assert late.turn.deadline_s is not None
        assert now_s + late.turn.deadline_s == now_s
    endless = Request("Once")
    assert endless.after(math.inf) is endless
