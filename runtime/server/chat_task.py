"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_run.base.config import SamplingConfig
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.formats.marked_output import THINK, THOUGHT
from edge_run.runtime.server.formats.tool_format import HERMES, ToolFormat, format_of
from edge_run.runtime.server.generating import Job, OutputParser, PlainOutput
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
        """Return the text that the answer continues. Raises Refusal, and what `Model.chat_prompt` raises."""
        text, _ = await self._prompt(served, format_of(served.model.chat_template))
        return text

    async def job(self, served: ServedModel, sampling: SamplingConfig, max_tokens: int | None, choices: int = 1) -> Job:
        """Return what is to be generated. Raises Refusal, and what `Model.chat_prompt` raises."""
        toolbox, known = self.toolbox, format_of(served.model.chat_template)
        form = known or HERMES
        toolbox.check()
        has_form = bool(sampling.grammar or sampling.json_schema)
        if toolbox.is_forced:
            if has_form:
                raise Refusal(400, "tool_choice: a call that must be made has a form already", param="tool_choice")
            sampling = sampling_of(sampling, json_schema=toolbox.forced_schema(form))
        text, begins = await self._prompt(served, known)
        if has_form and not begins:
            text, begins = f"{text}{form.answer_begins}", form.answer_begins
        tokens = await served.prompt_tokens(text)
        parser = self._parser(served, form, text, begins)
        marks = () if parser is PlainOutput else form.marks
        return Job(tokens, sampling, served.limit(max_tokens), choices, parser, marks=marks)

    async def _prompt(self, served: ServedModel, form: ToolFormat | None) -> tuple[str, str]:
        """Return the text that the answer continues, and the marks at its end that are a part of the answer.

        A last message of the assistant is the beginning of the answer.
        """
        toolbox, messages, beginning = self.toolbox, self.messages, ""
        last = messages[-1]
        if last["role"] == "assistant" and not last.get("tool_calls") and len(messages) > 1:
            messages, beginning = messages[:-1], last["content"]
        variables = dict(self.variables)
        if form is not None:
            messages = form.messages(messages)
            if toolbox.tools:
                variables["tools"] = [tool.document() for tool in toolbox.tools]
        elif toolbox.tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages = toolbox.told(messages)
        text = await served.chat_prompt(messages, variables)
        form = form or HERMES
        if beginning:
            return f"{text}{form.answer_begins}{beginning}", form.answer_begins
        if not toolbox.is_forced:
            return text, ""
        thought = f"\n{THOUGHT}\n\n" if text.rstrip().endswith(THINK) else ""
        return f"{text}{thought}{form.begins}", form.begins

    def _parser(self, served: ServedModel, form: ToolFormat, prompt: str, begins: str) -> Callable[[], OutputParser]:
        begins = begins.strip()
        has_thoughts = self.has_thoughts and (form.is_always or THINK in served.model.chat_template)
        if has_thoughts and prompt.rstrip().endswith(THINK):
            begins = THINK
        tools = frozenset(tool.name for tool in self.toolbox.callable)
        if not (tools or has_thoughts or form.is_always):
            return PlainOutput
        most = 1_000 if self.toolbox.is_parallel else 1
        return lambda: form.parser(begins, has_thoughts, tools, most)
