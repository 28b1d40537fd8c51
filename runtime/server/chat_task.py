"""Conversations of every API, turned into what is to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edge_run.base.errors import ContextFull
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.chat import leave_out_oldest
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.formats.marked_output import THINK, THOUGHT
from edge_run.runtime.server.formats.tool_format import HERMES, ToolFormat, can_think, format_of
from edge_run.runtime.server.generating import Job, OutputParser, PlainOutput
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import sampling_of
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
        elif toolbox.callable and sampling.grammar:
            raise Refusal(
                400,
                "grammar: the answer could call no tool; leave out one of the two, or say tool_choice none",
                param="grammar",
            )
        limit, task = served.limit(max_tokens), self
        if self.drops_oldest and served.model.has_chat_template:
            task = await served.prepare(self._shortened, served, known, limit)
        text, begins = await task._prompt(served, known)
        if has_form and not begins:
            if sampling.json_schema:  # which no thought can be part of; a client's own grammar may have one
                text = _after_thought(text)
            if sampling.json_schema and toolbox.callable:
                sampling = sampling_of(sampling, json_schema=toolbox.call_or_schema(form, sampling.json_schema_text))
            else:
                text, begins = f"{text}{form.answer_begins}", form.answer_begins
        tokens = await served.prompt_tokens(text)
        parser = self._parser(served, form, text, begins)
        marks = () if parser is PlainOutput else form.marks
        return Job(tokens, sampling, limit, choices, parser, marks=marks)

    async def _prompt(self, served: ServedModel, form: ToolFormat | None) -> tuple[str, str]:
        """Return the text that the answer continues, and the marks at its end that are a part of the answer.

        A last message of the assistant is the beginning of the answer.
        """
        messages, variables, beginning = self._for_template(form)
        text = await served.chat_prompt(messages, variables)
        form = form or HERMES
        if beginning:
            return f"{_after_thought(text)}{form.answer_begins}{beginning}", form.answer_begins
        if not self.toolbox.is_forced:
            return text, ""
        return f"{_after_thought(text)}{form.begins}", form.begins

    def _for_template(self, form: ToolFormat | None) -> tuple[Sequence[dict[str, Any]], dict[str, Any], str]:
        """Return the messages and variables for the template, and what the answer begins with."""
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
        return messages, variables, beginning

    def _shortened(self, served: ServedModel, form: ToolFormat | None, max_tokens: int | None) -> ChatTask:
        """Return the task less the oldest turns, where it has no room. Takes its time."""
        model = served.model

        def count_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
            told, variables, _ = replace(self, messages=[dict(one) for one in messages])._for_template(form)
            try:
                return len(model.prompt_tokens(model.chat_prompt(told, variables)))
            except ContextFull:
                return model.context_tokens + 1

        kept = leave_out_oldest(self.messages, model.context_tokens, count_tokens, max_tokens)
        return replace(self, messages=[dict(one) for one in kept])

    def _parser(self, served: ServedModel, form: ToolFormat, prompt: str, begins: str) -> Callable[[], OutputParser]:
        begins = begins.strip()
        has_thoughts = self.has_thoughts and can_think(served.model.chat_template)
        if has_thoughts and prompt.rstrip().endswith(THINK):
            begins = THINK
        tools = self.toolbox.schemas
        if not (tools or has_thoughts or form.is_always):
            return PlainOutput
        most = 1_000 if self.toolbox.is_parallel else 1
        return lambda: form.parser(begins, has_thoughts, tools, most)


async def count(served: ServedModel, make_task: Callable[[], ChatTask]) -> int:
    """Return how many tokens a conversation's prompt has. Raises what `ChatTask.prompt` raises, and ContextFull."""
    task = await served.prepare(make_task)
    return len(await served.prompt_tokens(await task.prompt(served)))


def _after_thought(prompt: str) -> str:
    """Return a prompt of which the thought has ended that its template begins, if it begins one."""
    return f"{prompt}\n{THOUGHT}\n\n" if prompt.rstrip().endswith(THINK) else prompt
