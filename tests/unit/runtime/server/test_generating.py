"""Answers as they come: what each delta tells of tokens, and how many tokens there may be."""

from __future__ import annotations

from dataclasses import replace

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.generating import MOST_PROBABILITIES, Job


def test_probabilities_of_many_tokens_are_bounded() -> None:
    plain = Job([1], SamplingConfig(), 30_000)
    assert (plain.most_tokens, replace(plain, max_tokens=None).most_tokens) == (30_000, None)
    told = Job([1], SamplingConfig(top_logprobs=100), 30_000, choices=2, others=[[2]])
    assert told.most_tokens == MOST_PROBABILITIES // (101 * 4)
    assert replace(told, max_tokens=None).most_tokens == told.most_tokens
    assert replace(told, max_tokens=7).most_tokens == 7
