"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_run.base.errors import ContextFull
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.chat import leave_out_oldest
from edge_run.runtime.server.generating import Job, OutputParser, PlainOutput
from edge_run.runtime.server.marked_output import CALL, THINK, THOUGHT, MarkedOutput
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import sampling_of
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.tools import Toolbox


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

    async def prompt(self, service: Service) -> str:
        """Return the text that the answer continues. Raises Refusal, and what `Model.chat_prompt` raises.

        A last message of the assistant is the beginning of the answer.
        """
        toolbox = self.toolbox
        messages, variables, beginning = self._for_template(service)
        text = await service.chat_prompt(messages, variables)
        if beginning or not toolbox.is_forced:
            return f"{text}{beginning}"
        thought = f"\n{THOUGHT}\n\n" if text.rstrip().endswith(THINK) else ""
        return f"{text}{thought}{CALL}\n"

    def _for_template(self, service: Service) -> tuple[Sequence[dict[str, Any]], dict[str, Any], str]:
        """Return the messages and variables for the template, and what the answer begins with."""
        toolbox, messages, beginning = self.toolbox, self.messages, ""
        last = messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls") and len(messages) > 1:
            messages, beginning = messages[:-1], last["content"]
        variables = dict(self.variables)
        uses_tools = toolbox.tools or any(
            message.get("tool_calls") or message["role"] == "tool" for message in messages
        )
        if uses_tools and CALL not in service.model.chat_template:
            messages = toolbox.told(messages)
        elif toolbox.tools:
            variables["tools"] = [tool.document() for tool in toolbox.tools]
        return messages, variables, beginning

    def _shortened(self, service: Service, max_tokens: int | None) -> ChatTask:
        """Return the task less the oldest turns, where it has no room. Takes its time."""
        model = service.model

        def count_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
            told, variables, _ = replace(self, messages=[dict(one) for one in messages])._for_template(service)
            try:
                return len(model.prompt_tokens(model.chat_prompt(told, variables)))
            except ContextFull:
                return model.context_tokens + 1

        kept = leave_out_oldest(self.messages, model.context_tokens, count_tokens, max_tokens)
        return replace(self, messages=[dict(one) for one in kept])

    async def job(self, service: Service, sampling: SamplingConfig, max_tokens: int | None, choices: int = 1) -> Job:
        """Return what is to be generated. Raises Refusal, and what `Model.chat_prompt` raises."""
        toolbox = self.toolbox
        toolbox.check()
        if toolbox.is_forced:
            if sampling.grammar or sampling.json_schema:
                raise Refusal(400, "tool_choice: a call that must be made has a form already", param="tool_choice")
            sampling = sampling_of(sampling, json_schema=toolbox.call_schema())
        limit, task = service.limit(max_tokens), self
        if self.drops_oldest and service.model.has_chat_template:
            task = await service.prepare(self._shortened, service, limit)
        text = await task.prompt(service)
        tokens = await service.prompt_tokens(text)
        return Job(tokens, sampling, limit, choices, self._parser(service, text))

    def _parser(self, service: Service, prompt: str) -> Callable[[], OutputParser]:
        begins = CALL if self.toolbox.is_forced else ""
        has_thoughts = self.has_thoughts and THINK in service.model.chat_template
        if has_thoughts and prompt.rstrip().endswith(THINK):
            begins = THINK
        tools = frozenset(tool.name for tool in self.toolbox.callable)
        if not tools and not has_thoughts:
            return PlainOutput
        most = 1_000 if self.toolbox.is_parallel else 1
        return lambda: MarkedOutput(begins, has_thoughts, tools, most)
