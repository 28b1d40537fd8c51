"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_run.base.config import SamplingConfig
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import Job, OutputParser, PlainOutput
from edge_run.runtime.server.marked_output import CALL, THINK, THOUGHT, MarkedOutput
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import sampling_of
from edge_run.runtime.server.tools import Toolbox


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to be answered.

    messages: as templates know them. toolbox: what the answer may call. variables: what the template is told besides.
    has_thoughts: whether what a model thinks is told apart from what it says.
    """

    messages: Sequence[dict[str, Any]]
    toolbox: Toolbox = field(default_factory=Toolbox)
    variables: Mapping[str, Any] = field(default_factory=dict)
    has_thoughts: bool = True

    async def prompt(self, served: ServedModel) -> str:
        """Return the text that the answer continues. Raises Refusal, and what `Model.chat_prompt` raises.

        A last message of the assistant is the beginning of the answer.
        """
        toolbox, messages, beginning = self.toolbox, self.messages, ""
        last = messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls") and len(messages) > 1:
            messages, beginning = messages[:-1], last["content"]
        variables = dict(self.variables)
        uses_tools = toolbox.tools or any(
            message.get("tool_calls") or message["role"] == "tool" for message in messages
        )
        if uses_tools and CALL not in served.model.chat_template:
            messages = toolbox.told(messages)
        elif toolbox.tools:
            variables["tools"] = [tool.document() for tool in toolbox.tools]
        text = await served.chat_prompt(messages, variables)
        if beginning or not toolbox.is_forced:
            return f"{text}{beginning}"
        thought = f"\n{THOUGHT}\n\n" if text.rstrip().endswith(THINK) else ""
        return f"{text}{thought}{CALL}\n"

    async def job(self, served: ServedModel, sampling: SamplingConfig, max_tokens: int | None, choices: int = 1) -> Job:
        """Return what is to be generated. Raises Refusal, and what `Model.chat_prompt` raises."""
        toolbox = self.toolbox
        toolbox.check()
        if toolbox.is_forced:
            if sampling.grammar or sampling.json_schema:
                raise Refusal(400, "tool_choice: a call that must be made has a form already", param="tool_choice")
            sampling = sampling_of(sampling, json_schema=toolbox.call_schema())
        text = await self.prompt(served)
        tokens = await served.prompt_tokens(text)
        return Job(tokens, sampling, served.limit(max_tokens), choices, self._parser(served, text))

    def _parser(self, served: ServedModel, prompt: str) -> Callable[[], OutputParser]:
        begins = CALL if self.toolbox.is_forced else ""
        has_thoughts = self.has_thoughts and THINK in served.model.chat_template
        if has_thoughts and prompt.rstrip().endswith(THINK):
            begins = THINK
        tools = frozenset(tool.name for tool in self.toolbox.callable)
        if not tools and not has_thoughts:
            return PlainOutput
        most = 1_000 if self.toolbox.is_parallel else 1
        return lambda: MarkedOutput(begins, has_thoughts, tools, most)
