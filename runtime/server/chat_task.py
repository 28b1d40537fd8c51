"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.tool_use import ChatPrompt, ToolUse
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
    salt: what was computed of the prompt serves requests of the same salt only; None and empty: of those without one.
    """

    messages: Sequence[dict[str, Any]]
    toolbox: Toolbox = field(default_factory=Toolbox)
    variables: Mapping[str, Any] = field(default_factory=dict)
    has_thoughts: bool = True
    drops_oldest: bool = False
    salt: str | None = None

    async def prompt(self, served: ServedModel) -> str:
        """Return the text that the answer continues. Raises Refusal, and what `Model.chat_prompt` raises."""
        return (await self._prompt(served, self._use(served), SamplingConfig())).text

    async def job(self, served: ServedModel, sampling: SamplingConfig, max_tokens: int | None, choices: int = 1) -> Job:
        """Return what is to be generated. Raises Refusal, and what `Model.chat_prompt` raises."""
        use, asked = self._use(served), sampling
        _, beginning = self._begun()
        try:
            self.toolbox.check()
            sampling = use.sampling(asked, bool(beginning))
        except ConfigError as error:  # its message begins with what is wrong
            raise Refusal(400, str(error), param=str(error).partition(":")[0]) from None
        limit, salt, task = served.limit(max_tokens), served.salt(self.salt), self
        if self.drops_oldest and served.model.has_chat_template:
            task = await served.prepare(self._shortened, served, use, limit)
        chat = await task._prompt(served, use, asked)
        tokens = await served.prompt_tokens(chat.text)
        return Job(tokens, sampling, limit, choices, chat.parser, marks=chat.marks, salt=salt)

    def _use(self, served: ServedModel) -> ToolUse:
        return ToolUse(served.model.chat_template, self.toolbox, self.has_thoughts)

    async def _prompt(self, served: ServedModel, use: ToolUse, asked: SamplingConfig) -> ChatPrompt:
        model, (messages, beginning) = served.model, self._begun()
        if not model.has_chat_template:
            raise Refusal(400, "the model has no chat template: only plain completions work", code="not_supported")
        return await served.prepare(use.prompt, model.chat_prompt, messages, self.variables, asked, beginning)

    def _begun(self) -> tuple[Sequence[dict[str, Any]], str]:
        """Return the messages to be answered, and what the answer begins with: a last message of the assistant.

        A call that must be made begins an answer of its own.
        """
        messages, last = self.messages, self.messages[-1]
        is_text = last["role"] == "assistant" and not last.get("tool_calls")
        if is_text and len(messages) > 1 and not self.toolbox.is_forced:
            return messages[:-1], last["content"]
        return messages, ""

    def _shortened(self, served: ServedModel, use: ToolUse, max_tokens: int | None) -> ChatTask:
        """Return the task less the oldest turns, where it has no room. Takes its time."""
        model, (messages, _) = served.model, self._begun()

        def count_tokens(some: Sequence[dict[str, Any]]) -> int:
            return len(model.prompt_tokens(use.text(model.chat_prompt, some, self.variables)))

        kept = leave_out_oldest(messages, model.context_tokens, count_tokens, max_tokens)
        return replace(self, messages=[*kept, *self.messages[len(messages) :]])


async def count(served: ServedModel, make_task: Callable[[], ChatTask]) -> int:
    """Return how many tokens a conversation's prompt has. Raises what `ChatTask.prompt` raises, and ContextFull."""
    task = await served.prepare(make_task)
    return len(await served.prompt_tokens(await task.prompt(served)))
