"""Chat messages to prompt text, with the Jinja template that the model file brings.

A template is a stranger's program: it runs in a process of its own, within limits (`runtime/processes/cell.py`,
`template_jobs.py`). Not covered: images.

A conversation that has become longer than the context can be told without its oldest turns. A turn is what a user says,
and all that follows up to the next thing that the user says. What comes before the first turn always stays, and so do
what the system says, wherever it does, and the last turn, which is to be answered.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from edge_run.base.errors import ConfigError, ContextFull, ModelFileError
from edge_run.base.files.texts import read_text_file
from edge_run.base.options import is_list
from edge_run.runtime.generation.request import Message
from edge_run.runtime.processes.cell import Cell, Overrun

TEMPLATE_KEY = "tokenizer.chat_template"
MOST_TEMPLATE_BYTES = 1 << 20  # the longest in use have some 30,000
_JOBS = "edge_run.runtime.generation.template_jobs"
_ROLES = {"developer": "system"}  # what OpenAI's clients call it to what templates do
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # to their texts
LEAST_ANSWER_SHARE = 8  # of the context: an eighth is kept free for an answer of which nobody said how long it may be
KEPT_SHARE = 2  # half of the context is kept, so that what is kept need not be read anew with each message

_SYSTEM = "system"
_PROBE = {"role": _SYSTEM, "content": "What the system says."}
_SECOND_PROBE = {"role": _SYSTEM, "content": "What the system says later."}
_USER, _ASSISTANT = {"role": "user", "content": "What the user says."}, {"role": "assistant", "content": "An answer."}
_FIRST = (_PROBE, _USER)
_TWO_FIRST = (_PROBE, _SECOND_PROBE, _USER)
_LATER = (_PROBE, _USER, _ASSISTANT, _SECOND_PROBE, _USER)

Metadata = Callable[[str], "str | None"]
_Message = TypeVar("_Message", bound=Message)


def template_cell() -> Cell:
    """Return what templates are rendered in, not started yet."""
    return Cell(_JOBS)


class ChatTemplate:
    """Renders a conversation as one model wants to see it.

    source: Jinja text. bos, eos: text of the tokens that begin and end a sequence, `""` where there is none.
    is_override: the caller chose the template, so its mistakes are a ConfigError and not a ModelFileError.
    now: what time the template is told. cell: where to render it, by default one of its own.
    Raises ConfigError for an override that is not Jinja, or that takes too much to find out; what is wrong with the
    template of a file is said when it is to render something, as plain completion needs none.
    Rendering changes nothing: one template may serve many threads.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        is_override: bool = False,
        now: Callable[[], datetime] = datetime.now,
        cell: Cell | None = None,
    ) -> None:
        self.source = source
        self._variables = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._is_override = is_override
        self._now = now
        self._cell = cell or template_cell()
        self._writes: dict[int, bool | None] = {}  # what was found out, by the probes of each conversation
        if is_override:
            self._ask("compile_template")

    @classmethod
    def from_model(
        cls, metadata: Metadata, bos: str, eos: str, override: str | None = None, cell: Cell | None = None
    ) -> ChatTemplate | None:
        """Return the model's template, or None where it has none (use plain completion then).

        metadata: a key of the model file to its text, or None. override: Jinja text to use instead, or the path of
        a file with it. Raises ConfigError for an override that cannot be read or is not Jinja.
        """
        if override is not None:
            return cls(override_text(override), bos, eos, is_override=True, cell=cell)
        source = metadata(TEMPLATE_KEY)
        return cls(source, bos, eos, cell=cell) if source else None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for `messages`, oldest first, as `plain_messages` returns them.

        add_generation_prompt: end with what opens the assistant's answer. variables: what the template is told besides,
        `tools` for one. The text holds special tokens as text, with the one that begins a sequence where the template
        writes it: parse them when tokenizing, and begin the sequence only once. Raises ConfigError for messages that
        the template refuses, and ModelFileError (ConfigError for an override) when the template itself fails, or takes
        more time or memory than rendering may take. Ctrl-C ends it at once.

        What the system says first to a template that knows no system is the beginning of the next message, as with
        llama.cpp. Nothing that it says is lost: where a template would leave out, or refuse, a second message of the
        system at the beginning, the two are one; where it would leave out a later one, or refuses a conversation, it is
        told it `in_turns`, if that is another one.
        """
        if not messages:
            raise ConfigError("chat: no messages; give at least one, such as the user's")
        told = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        messages = self._with_system(messages)
        try:
            return self._rendered(messages, told)
        except ConfigError:
            tried = [[*messages]]
            for joins_users in (False, True):
                if (others := in_turns(messages, joins_users)) not in tried:
                    tried.append(others)
                    with contextlib.suppress(ConfigError, ModelFileError):
                        return self._rendered(others, told)
            raise

    def _with_system(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return a conversation of which the template leaves out nothing that the system says."""
        first = [*takewhile(lambda one: one["role"] == _SYSTEM, messages)]
        others = messages[len(first) :]
        if len(first) > 1 and not self._is_written(_TWO_FIRST):
            first = [{**first[0], "content": "\n\n".join(one["content"] for one in first)}]
        if len(first) == 1 and others and not self._is_written(_FIRST):
            content = f"{first[0]['content']}\n{others[0]['content']}"
            first, others = [], [{**others[0], "content": content}, *others[1:]]
        messages = [*first, *others]
        if any(one["role"] == _SYSTEM for one in others) and self._is_written(_LATER) is False:
            return in_turns(messages, joins_users=False)
        return messages

    def _is_written(self, probes: Sequence[dict[str, Any]]) -> bool | None:
        """Return whether the template writes all that the system says in a conversation; None where it refuses that.

        As llama.cpp finds out whether templates know a system. What exceeds the cell's limits is raised, as `render`
        does, since it may pass the next time.
        """
        if len(probes) not in self._writes:
            try:
                text = self._rendered(probes, {"add_generation_prompt": True})
                found = all(one["content"] in text for one in probes if one["role"] == _SYSTEM)
            except (ConfigError, ModelFileError) as error:
                if isinstance(error.__cause__, Overrun):
                    raise
                found = None
            self._writes[len(probes)] = found
        return self._writes[len(probes)]

    def _rendered(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        told = {**self._variables, **variables, "messages": messages}
        try:
            text = self._ask("render", now=self._now().isoformat(), variables=told)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"chat messages: must be what JSON can say ({error})") from error
        return text.decode("utf-8", "surrogatepass")

    def _ask(self, job: str, **fields: Any) -> bytes:
        if len(self.source) > MOST_TEMPLATE_BYTES:
            raise self._refusal(f"has {len(self.source):,} characters, {MOST_TEMPLATE_BYTES:,} are the most")
        try:
            return self._cell.ask(job, source=self.source, is_override=self._is_override, **fields)
        except Overrun as overrun:
            raise self._refusal(str(overrun)) from overrun

    def _refusal(self, reason: str) -> ConfigError | ModelFileError:
        if self._is_override:
            return ConfigError(f"chat template: {reason}; give another one")
        return ModelFileError(
            f"chat template of the model file: {reason}; give another one as chat template, or use plain completion"
        )


def in_turns(messages: Sequence[dict[str, Any]], joins_users: bool = True) -> list[dict[str, Any]]:
    """Return a conversation in which the system speaks first or not at all.

    What it says later becomes a part of what the user says, or a tool gave, before it: the text up to there stays as it
    was, and need not be read anew. After what the assistant says it becomes the user's, with what the user says next;
    after calls of tools it waits for the first result.
    joins_users: what the user, or at the beginning the system, says in a row is one message.
    """
    told, texts, held = list[dict[str, Any]](), list[list[str]](), list[str]()
    is_systems_alone = False  # whether the last message has only what the system says
    joined = (_SYSTEM, "user") if joins_users else ()

    def add(message: dict[str, Any], *contents: str) -> None:
        told.append(message)
        texts.append([*contents])

    for message in messages:
        role, content = message["role"], message["content"]
        if role == _SYSTEM and told and told[-1]["role"] != _SYSTEM:
            content = f"<system>\n{content}\n</system>"
            if told[-1]["role"] in ("user", "tool"):
                texts[-1].append(content)
            elif told[-1].get("tool_calls"):
                held.append(content)
            else:
                add({**message, "role": "user"}, content)
                is_systems_alone = True
            continue
        if held and role != "tool":
            add({"role": "user"}, *held)
            held, is_systems_alone = [], True
        if is_systems_alone and role == "user":
            told[-1] = message
            texts[-1].append(content)
        elif told and role == told[-1]["role"] in joined:
            texts[-1].append(content)
        else:
            add(message, content, *held)
            held = []
        is_systems_alone = False
    if held:
        add({"role": "user"}, *held)
    return [{**message, "content": "\n\n".join(parts)} for message, parts in zip(told, texts, strict=True)]


def plain_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """Return copies of the messages as templates know them: each content a text, what a `developer` says the system's.

    A content may be parts of text, and a message that calls tools (`tool_calls`) needs none. Raises ConfigError that
    says which message cannot be.
    """
    return [_checked(index, message) for index, message in enumerate(messages)]


def template_role(role: str) -> str:
    """Return what templates call a role of a message: a `developer` is the system."""
    return _ROLES.get(role, role)


def text_of_parts(parts: Sequence[object], refusal: Callable[[int], Exception]) -> str:
    """Return the text of a content in parts, as OpenAI's clients write it; each part begins a line.

    refusal: makes the error to raise for the part of a number, where that is no text, such as a picture, or lacks it.
    """
    texts = list[str]()
    for number, part in enumerate(parts):
        text = part.get(TEXT_PARTS.get(str(part.get("type")))) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise refusal(number)
        texts.append(text)
    return "\n".join(texts)


def override_text(override: str) -> str:
    """Return the template that `override` is, or the text of the file that it names."""
    if any(mark in override for mark in ("{{", "{%", "{#", "\n")):
        return override
    return read_text_file(
        override, f"chat template {override!r}: not Jinja text and not a readable file", MOST_TEMPLATE_BYTES
    )


def _checked(index: int, message: object) -> dict[str, Any]:
    """Return a copy of one message, its content as one text; raise ConfigError unless its role and content are text."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"chat message {index}: must have a role and a content, found {type(message).__name__}")
    if message.get("tool_calls") and message.get("content") is None:
        message = {**message, "content": ""}  # templates add to it, or ask how long it is
    elif is_list(message.get("content")):
        message = {**message, "content": text_of_parts(message["content"], partial(_no_text, index))}
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = type(message[key]).__name__ if key in message else "none"
            raise ConfigError(f"chat message {index}: {key} must be text, found {found}")
    if not message["role"]:
        raise ConfigError(f"chat message {index}: role must not be empty")
    return {**message, "role": template_role(message["role"])}


def _no_text(index: int, part: int) -> ConfigError:
    return ConfigError(
        f'chat message {index}: part {part} of its content must be text, as {{"type": "text", "text": "..."}}; others '
        "are not read"
    )


def leave_out_oldest(
    messages: Sequence[_Message],
    context_tokens: int,
    count_tokens: Callable[[Sequence[_Message]], int],
    max_tokens: int | None = None,
) -> Sequence[_Message]:
    """Return the conversation with room for an answer in `context_tokens`, less its oldest turns where it has none.

    count_tokens: returns the tokens of a conversation; may raise ContextFull for one that has clearly no room.
    max_tokens: of the answer; None is as many as may be.

    Where turns must go, so many go that the rest is half of the context, if that can be. What has no room even without
    them is returned with its last turn alone.
    """
    room = context_tokens // LEAST_ANSWER_SHARE
    room = max(1, room if max_tokens is None else min(room, max_tokens))
    if _fits(messages, context_tokens - room, count_tokens):
        return messages
    return without_oldest(messages, context_tokens, count_tokens)


def without_oldest(
    messages: Sequence[_Message], context_tokens: int, count_tokens: Callable[[Sequence[_Message]], int]
) -> Sequence[_Message]:
    """Return the conversation less as many of its oldest turns, one at least, as leave half of the context.

    A conversation of one turn is returned as it is. count_tokens: as of `leave_out_oldest`.
    """
    begins = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if len(begins) < 2:
        return messages
    first, *others = begins

    def beginning_at(begin: int) -> Sequence[_Message]:
        system = (one for one in messages[first:begin] if template_role(str(one.get("role"))) == "system")
        return [*messages[:first], *system, *messages[begin:]]

    most = context_tokens // KEPT_SHARE
    fits = bisect_left(others, True, key=lambda begin: _fits(beginning_at(begin), most, count_tokens))
    return beginning_at(others[min(fits, len(others) - 1)])


def _fits(messages: Sequence[_Message], most: int, count_tokens: Callable[[Sequence[_Message]], int]) -> bool:
    try:
        return count_tokens(messages) <= most
    except ContextFull:
        return False
