"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_run.base.errors import ConfigError, ContextFull
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import PlainOutput
from edge_run.runtime.formats.tool_use import ToolUse
from edge_run.runtime.formats.tools import Toolbox
from edge_run.runtime.generation.chat import leave_out_oldest
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import Job
from edge_run.runtime.server.refusals import Refusal


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to be answered.

    messages: as templates know them. toolbox: what the answer may call. variables: what the template is told besides.
    has_thoughts: whether what a model thinks is told apart from what it says.
    drops_oldest: whether the oldest turns are left out where the conversation has no room in the context.
    """

    messages: Sequence[dict[str, Any]]
    toolbox: Toolbox = field(default_factory=Toolbox)
    variables: Mapping[str, Any] = field(default_factory=dict)
    has_thoughts: bool = True
    drops_oldest: bool = False

    async def prompt(self, served: ServedModel) -> str:
        """Return the text that the answer continues. Raises Refusal, and what `Model.chat_prompt` raises."""
        text, _ = await self._prompt(served, self._use(served), SamplingConfig())
        return text

    async def job(self, served: ServedModel, sampling: SamplingConfig, max_tokens: int | None, choices: int = 1) -> Job:
        """Return what is to be generated. Raises Refusal, and what `Model.chat_prompt` raises."""
        use, asked = self._use(served), sampling
        _, beginning = self._begun()
        try:
            self.toolbox.check()
            sampling = use.sampling(asked, bool(beginning))
        except ConfigError as error:  # its message begins with what is wrong
            raise Refusal(400, str(error), param=str(error).partition(":")[0]) from None
        limit, task = served.limit(max_tokens), self
        if self.drops_oldest and served.model.has_chat_template:
            task = await served.prepare(self._shortened, served, use, limit)
        text, begins = await task._prompt(served, use, asked)
        tokens = await served.prompt_tokens(text)
        parser = use.parser(text, begins)
        marks = () if parser is PlainOutput else use.form.marks
        return Job(tokens, sampling, limit, choices, parser, marks=marks)

    def _use(self, served: ServedModel) -> ToolUse:
        return ToolUse(served.model.chat_template, self.toolbox, self.has_thoughts)

    async def _prompt(self, served: ServedModel, use: ToolUse, asked: SamplingConfig) -> tuple[str, str]:
        """Return the text that the answer continues, and the marks at its end that are a part of the answer."""
        messages, variables, beginning = self._for_template(use)
        text = await served.chat_prompt(messages, variables)
        return use.opened(text, asked, beginning)

    def _begun(self) -> tuple[Sequence[dict[str, Any]], str]:
        """Return the messages to be answered, and what the answer begins with: a last message of the assistant."""
        messages, last = self.messages, self.messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls") and len(messages) > 1:
            return messages[:-1], last["content"]
        return messages, ""

    def _for_template(self, use: ToolUse) -> tuple[Sequence[dict[str, Any]], dict[str, Any], str]:
        """Return the messages and variables for the template, and what the answer begins with."""
        messages, beginning = self._begun()
        told, variables = use.told(messages)
        return told, {**self.variables, **variables}, beginning

    def _shortened(self, served: ServedModel, use: ToolUse, max_tokens: int | None) -> ChatTask:
        """Return the task less the oldest turns, where it has no room. Takes its time."""
        model = served.model

        def count_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
            told, variables, _ = replace(self, messages=[dict(one) for one in messages])._for_template(use)
            try:
                return len(model.prompt_tokens(model.chat_prompt(told, variables)))
            except ContextFull:
                return model.context_tokens + 1

        kept = leave_out_oldest(self.messages, model.context_tokens, count_tokens, max_tokens)
        return replace(self, messages=[dict(one) for one in kept])


async def count(served: ServedModel, make_task: Callable[[], ChatTask]) -> int:
    """Return how many tokens a conversation's prompt has. Raises what `ChatTask.prompt` raises, and ContextFull."""
    task = await served.prepare(make_task)
    return len(await served.prompt_tokens(await task.prompt(served)))
