"""How tokens are chosen: a frozen dataclass that refuses impossible values on construction."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from edge_run.base.errors import ConfigError, wording
from edge_run.base.options import check_types, require, texts_of

MOST_PENALTY, MOST_TOP_LOGPROBS = 100, 100
LARGEST = 1_000_000  # of a factor or a bias, and 1 over it: logits have 32 bits, and what is beyond them is no number


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the next token is chosen; names, defaults and order are llama.cpp's.

    temperature: 0 always takes the best token (greedy), and so does what is below 0.000001.
    top_k: choose among so many best tokens; 0 is all. top_p: among the best that make up this probability, above 0 and
        at most 1. min_p: among those that have at least this share, 0 to 1, of the best one's probability.
    repeat_penalty: on the tokens of the last repeat_last_n (-1: the context; 0: none); 1 is none.
    seed: 0 to 4294967294; None draws one, and the answer says which.
    grammar: GBNF text that the answer must follow.
    json_schema: a JSON schema that it must follow, as text, or as a mapping, which becomes text; not beside a grammar.
    stop: the answer ends before the first of these strings; a single one may be given as it is.
    frequency_penalty, presence_penalty: taken from a token's logit for each time that it was there within
        repeat_last_n, and once if it was.
    logit_bias: added to the logits of tokens, by their ids; -inf bans one.
    top_logprobs: how many of the likeliest tokens are told of with each token, with their log-probabilities before
        anything was done to the logits; None tells nothing.
    ignore_eos: the model never ends the answer: what would is not chosen.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    stop: Sequence[str] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        require(0 <= self.temperature <= LARGEST, f"temperature {self.temperature}: must be 0 (greedy) to {LARGEST}")
        if self.temperature < 1 / LARGEST:
            object.__setattr__(self, "temperature", 0.0)
        require(self.top_k >= 0, f"top-k {self.top_k}: must be 0 (all) or more")
        require(0 < self.top_p <= 1, f"top-p {self.top_p}: must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, f"min-p {self.min_p}: must be 0 to 1")
        penalty = self.repeat_penalty
        require(1 / LARGEST <= penalty <= LARGEST, f"repeat penalty {penalty}: must be {1 / LARGEST:f} to {LARGEST}")
        require(self.repeat_last_n >= -1, f"repeat last n {self.repeat_last_n}: must be -1 (context) or more tokens")
        require(
            self.seed is None or 0 <= self.seed < 2**32 - 1,
            f"seed {self.seed}: must be 0 to 4294967294; {wording('--seed -1', 'None')} draws one",
        )
        require(not (self.grammar and self.json_schema), "grammar and JSON schema: give one of the two")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(abs(value) <= MOST_PENALTY, f"{name.replace('_', ' ')} {value}: must be -100 to 100")
        for token, bias in self.logit_bias.items():
            is_number = isinstance(bias, int | float) and (abs(bias) <= LARGEST or bias == -math.inf)
            bounds = f"must be a number from -{LARGEST} to {LARGEST}, or -inf"
            require(type(token) is int and is_number, f"logit bias of {token!r}: {bias!r}: {bounds}")
        top = self.top_logprobs
        require(top is None or 0 <= top <= MOST_TOP_LOGPROBS, f"top logprobs {top}: must be 0 to {MOST_TOP_LOGPROBS}")
        object.__setattr__(self, "stop", texts_of("stop string", self.stop))
        require(all(self.stop), "stop string: must not be empty")

    @property
    def json_schema_text(self) -> str:
        """The JSON schema as text; empty where there is none."""
        return self.json_schema if isinstance(self.json_schema, str) else ""


def _json_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as text. Raises ConfigError for what JSON cannot say."""
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"JSON schema: must be what JSON can say ({error})") from error


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingConfig` as keywords that may each be given, for who checks types."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    seed: int | None
    grammar: str | None
    json_schema: str | Mapping[str, Any] | None
    stop: Sequence[str]
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    top_logprobs: int | None
    ignore_eos: bool


class AnswerOptions(SamplingOptions, total=False):
    """What an answer is to be: the fields of `SamplingConfig`, or one as `sampling`, and others; see `Request`."""

    max_tokens: int | None
    sampling: SamplingConfig | None
    marks: Sequence[str]
    on_read: Callable[[int], object] | None


class ChatOptions(AnswerOptions, total=False):
    """What the answer of a conversation is to be; see `Request`."""

    drops_oldest: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None


class TimedAnswerOptions(AnswerOptions, total=False):
    """What an answer is to be, and the seconds after which it ends as it is; None for never."""

    deadline_s: float | None


class TimedChatOptions(ChatOptions, total=False):
    """The same of the answer of a conversation."""

    deadline_s: float | None
