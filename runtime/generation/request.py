"""What is asked of a model: a prompt, how its answer is made, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from edge_run.base.errors import ConfigError
from edge_run.base.options import make_config
from edge_run.base.sampling_config import SamplingConfig, SamplingOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"


@dataclass(frozen=True, slots=True)
class Turn:
    """When a request is served, if not all can be at once.

    priority: a request of a higher one is admitted first; one that waits rises by 1 for each 30 seconds in which no
        request of its key and priority is admitted.
    key: whose it is: keys that wait have equal shares of the tokens.
    deadline_s: the seconds after which its answer ends as it is; None for never.
    salt: what was computed for a request serves those of the same salt only, so that no other can tell from the time
    that it takes what was asked before.
    """

    priority: int = 0
    key: str = ""
    deadline_s: float | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(f"deadline {self.deadline_s}: must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Request:
    """One of many prompts, with settings of its own.

    prompt: text, tokens, or the messages of a conversation.
    max_tokens: of the answer at most; None is until the model ends it or the context is full.
    sampling: how tokens are chosen.
    turn: when it is served.
    drops_oldest: whether the oldest turns of a conversation are left out where it has no room in the context.
    marks: control tokens, by their texts, that are a part of the answer's text; others are not.
    """

    prompt: Prompt
    max_tokens: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    turn: Turn = field(default_factory=Turn)
    drops_oldest: bool = False
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"max tokens {self.max_tokens}: must be 0 or more")


def make_request(
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    sampling: SamplingConfig | None = None,
    turn: Turn | None = None,
    drops_oldest: bool = False,
    marks: tuple[str, ...] = (),
    **options: Unpack[SamplingOptions],
) -> Request:
    """Return a request; `options` are the fields of `SamplingConfig`. Raises ConfigError."""
    if sampling is not None and options:
        raise ConfigError("sampling and single options: give one of the two")
    sampling = sampling or make_config(SamplingConfig, options)
    return Request(prompt, max_tokens, sampling, turn or Turn(), drops_oldest, marks)
