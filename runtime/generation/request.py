"""What is asked of a model: a prompt, how its answer is made, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from edge_run.base.errors import ConfigError
from edge_run.base.options import check_types, is_list, make_config, texts_of, whole_numbers
from edge_run.base.protocols import Text
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tools import AUTO, NONE, Toolbox

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = Text | Sequence[Message]
_FORM = '[{"role": "user", "content": "..."}]'
_TOOLS = ("tools", "tool_choice")  # None is as nothing
_BESIDE = ("max_tokens", "sampling", "deadline_s", "drops_oldest", "marks", "on_read", *_TOOLS)
_OVER_S = sys.float_info.min  # the deadline of a request whose time is over: added to a clock it is nothing


@dataclass(frozen=True, slots=True)
class Turn:
    """When a request is served, if not all can be at once.

    priority: a request of a higher one is admitted first; one that waits rises by 1 for each 30 seconds in which no
        request of its key and priority is admitted.
    key: whose it is: keys that wait have equal shares of the tokens.
    deadline_s: the seconds after which its answer ends as it is; None for never.
    salt: what was computed for a request serves those of the same salt only, so that no other can tell from the time
    that it takes what was asked before. A prompt cache on disk serves all salts: leave it off where that matters.
    """

    priority: int = 0
    key: str = ""
    deadline_s: float | None = None
    salt: str = ""

    def __post_init__(self) -> None:
        check_types(self)
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
    on_read: is told how many tokens of the prompt are read: first those that were there already, then those after each
        pass that read some. It is called by the thread that computes, whose time it takes; where it raises, that is
        logged, and it is told no more.
    tools: the functions that the answer of a conversation may call, as OpenAI's clients write them:
        `{"type": "function", "function": {"name", "description", "parameters"}}`, the last a JSON schema.
    tool_choice: `auto`, `none`, `required` (a call must be made), or the function that must be called:
        `{"type": "function", "function": {"name"}}`, which may itself be called `auto`.
    toolbox: what the answer may call, made of these two.
    """

    prompt: Prompt
    max_tokens: int | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    turn: Turn = field(default_factory=Turn)
    drops_oldest: bool = False
    marks: Sequence[str] = ()
    on_read: Callable[[int], object] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = AUTO
    toolbox: Toolbox = field(default_factory=Toolbox, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(
                f"max tokens {self.max_tokens}: must be 0 or more, or None for as many as there is room for"
            )
        object.__setattr__(self, "marks", texts_of("mark", self.marks))
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", _checked(self.prompt))
        object.__setattr__(self, "tools", tuple(self.tools))
        if self.tools and not self.messages:
            raise ConfigError("tools: are for the answer of a conversation, of one message at least")
        object.__setattr__(self, "toolbox", Toolbox.of(self.tools, self.tool_choice))
        self.toolbox.check_form(self.sampling)

    @property
    def messages(self) -> Sequence[Message]:
        """The messages, where the prompt is a conversation; none where it is not."""
        is_chat = not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)
        return cast("Sequence[Message]", self.prompt) if is_chat else ()

    def after(self, waited_s: float) -> Request:
        """Return it as it is after such a wait: its deadline is nearer, and once that is over it needs no grammar."""
        if self.turn.deadline_s is None:
            return self
        if (left_s := self.turn.deadline_s - waited_s) > 0:
            return replace(self, turn=replace(self.turn, deadline_s=left_s))
        sampling = replace(self.sampling, grammar=None, json_schema=None)
        choice = NONE if self.tool_choice == NONE else AUTO  # a call that must be made would need a grammar
        return replace(self, sampling=sampling, tool_choice=choice, turn=replace(self.turn, deadline_s=_OVER_S))


def _checked(prompt: object) -> Sequence[int] | Sequence[Message]:
    """Return a prompt that is no text as a list; a tuple of tokens, which many requests may share, as it is.

    Raises ConfigError.
    """
    if isinstance(prompt, tuple) and all(type(one) is int for one in prompt):
        return prompt
    if not is_list(prompt):
        raise ConfigError(f"prompt {prompt!r:.60}: must be text, a list of tokens or a list of messages")
    found = list(cast("Sequence[Any]", prompt))
    if not any(isinstance(one, Mapping) for one in found):
        return whole_numbers("prompt", found)
    if strange := [one for one in found if not isinstance(one, Mapping)]:
        raise ConfigError(f"chat message {strange[0]!r:.60}: must have a role and a content: {_FORM}")
    return found


def text_request(prompt: Text, **options: Any) -> Request:
    """Return a request to continue a text, or tokens; `options` as of `make_request`. Raises ConfigError."""
    request = make_request(prompt, **options)
    if request.messages:
        raise ConfigError("prompt: is a conversation; give it to chat or stream_chat")
    if request.drops_oldest:
        raise ConfigError("drops oldest: leaves out turns of a conversation; give one to chat or stream_chat")
    return request


def chat_request(messages: Sequence[Message], **options: Any) -> Request:
    """Return a request to answer a conversation; `options` as of `make_request`. Raises ConfigError."""
    if not is_list(messages) or (len(messages) and not isinstance(messages[0], Mapping)):
        raise ConfigError(f"chat {messages!r:.60}: must be a list of messages: {_FORM}; generate continues plain text")
    return make_request(messages, **options)


def make_request(
    prompt: Prompt,
    *,
    sampling: SamplingConfig | None = None,
    turn: Turn | None = None,
    deadline_s: float | None = None,
    **options: Any,
) -> Request:
    """Return a request; `options` are the fields of `SamplingConfig`, and the others of `Request`. Raises ConfigError.

    deadline_s: of its turn, where none is given.
    """
    given: dict[str, Any] = {name: options.pop(name) for name in _BESIDE if name in options}
    given = {name: value for name, value in given.items() if value is not None or name not in _TOOLS}
    if sampling is not None and options:
        raise ConfigError("sampling and single options: give one of the two")
    sampling = sampling or make_config(SamplingConfig, options, _BESIDE)
    return Request(prompt, sampling=sampling, turn=turn or Turn(deadline_s=deadline_s), **given)
