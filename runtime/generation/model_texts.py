"""What an open model knows of texts: text to tokens and back, and a conversation to the text that it goes on with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, NotSupported, option, wording
from edge_run.base.options import whole_numbers
from edge_run.base.protocols import Text, TokenArray
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.embedding.texts import TextTokens, text_tokens
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.formats.output import OutputParser
from edge_run.runtime.formats.tool_use import ToolUse, with_arguments
from edge_run.runtime.generation.chat import ChatTemplate, leave_out_oldest, plain_messages, without_oldest
from edge_run.runtime.generation.request import Message, Request
from edge_run.runtime.llama.prompt_text import (
    CLEARLY_IN_A_CHAT,
    GapMarks,
    gap_marks,
    refuse_what_is_too_long,
    tokenize_prompt,
)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request as the model has it.

    tokens: of its prompt. marks: control tokens that are a part of the answer's text. parser: tells apart what the
    answer says, thinks and calls; None where it answers no conversation. dropped_messages: those that were left out.
    """

    tokens: Sequence[int]
    marks: frozenset[int]
    parser: OutputParser | None
    dropped_messages: int


class ModelTexts(Closing):
    """The texts of an open model. What turns text into tokens is thread-safe."""

    path: Path
    _template: ChatTemplate | None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.path)!r}>"

    @property
    @abstractmethod
    def _opened(self) -> Engine:
        """Return the engine. Raises ConfigError where the model was closed."""

    @property
    def _vocab(self) -> Any:
        return self._opened.model.vocab

    @property
    def context_tokens(self) -> int:
        """The tokens that a prompt and its answer may have."""
        return self._opened.front.capabilities.context_tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work: the file, or the caller, gave a template."""
        return self._template is not None

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template; empty where there is none."""
        return self._template.source if self._template else ""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of `text`. parse_special: control tokens written in it (`<|im_end|>`) count as such."""
        return self._opened.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int] | TokenArray, *, has_control: bool = False) -> str:
        """Return the text of `tokens`, a list or an array. has_control: with that of control tokens."""
        tokens = whole_numbers("tokens", tokens)
        self.check_tokens("tokens", tokens)
        model = self._opened.model
        return b"".join(model.token_bytes(one, has_control=has_control) for one in tokens).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, has_control: bool = False) -> bytes:
        """Return the bytes that a token stands for, which may be a part of a character.

        has_control: those of its text for a control token, which stands for none else.
        """
        (number,) = whole_numbers("token", (token,))
        self.check_tokens("token", (number,))
        return self._opened.model.token_bytes(number, has_control=has_control)

    def check_tokens(self, what: str, tokens: Iterable[int]) -> None:
        """Raise ConfigError, which calls them `what`, where one of `tokens` is none of the vocabulary.

        llama.cpp would end the process over it.
        """
        vocabulary = self._opened.model.vocabulary
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise ConfigError(f"{what}: token {outside} is outside the vocabulary of {vocabulary}")

    def text_tokens(self, texts: Text | Iterable[Text], *, truncate: bool = False) -> TextTokens:
        """Return the tokens that `embed` computes of texts; it raises what that raises of them."""
        return text_tokens(self._opened, texts, truncate=truncate)

    def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a prompt as `generate` makes them: with BOS, and control tokens in it as such.

        Raises ContextFull for a text that is clearly too long, ConfigError for what the vocabulary cannot write.
        """
        return tokenize_prompt(self._opened.model, text, self.context_tokens)

    @property
    def gap_marks(self) -> GapMarks | None:
        """The tokens that tell the model of a gap in a text, as in code; None where it was not made to fill any."""
        return gap_marks(self._opened.model)

    def chat_prompt(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Return the text that the template makes of messages, as they are, without the BOS that `prompt_tokens` adds.

        It is what `stream_chat` continues where no tools are called. variables: what else the template is told, such as
        `tools`. Raises NotSupported when there is no template, and what `plain_messages` and `ChatTemplate.render`
        raise.
        """
        return self._rendered(plain_messages(messages), variables)

    def _rendered(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None) -> str:
        if self._template is None:
            raise NotSupported(
                f"{self.path}: has no chat template; give one with {option('chat_template')}, or use plain completion "
                f"({wording('-p', 'generate')})"
            )
        room_tokens = self.context_tokens
        said = "\n".join(message["content"] for message in messages)
        refuse_what_is_too_long(self._opened.model, said, room_tokens, CLEARLY_IN_A_CHAT)
        text = self._template.render(messages, variables=variables)
        bos = self._special(self._opened.model.bos_token)
        if bos and self._opened.model.adds_bos and text.startswith(bos):
            return text[len(bos) :]
        return text

    def without_oldest(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation less its oldest turns, so many that half of the context is free if that can be.

        What the system says stays, and so does the last turn. Raises what `chat_prompt` raises, but for ContextFull.
        """
        told, count_tokens = _for_templates(messages), partial(self._count_tokens, ToolUse(self.chat_template))
        kept = {id(one) for one in without_oldest(told, self.context_tokens, count_tokens)}
        return [message for message, one in zip(messages, told, strict=True) if id(one) in kept]

    def sampling_of(self, request: Request) -> SamplingConfig:
        """Return how the tokens of an answer are chosen: as the request says, and so that it calls what it must.

        Raises ConfigError where the answer cannot have both forms, that of a call and the one that was asked for.
        """
        return self._tool_use(request).sampling(request.sampling) if request.tools else request.sampling

    def _tool_use(self, request: Request) -> ToolUse:
        return ToolUse(self.chat_template, request.toolbox)

    def _read(self, request: Request) -> ReadRequest:
        """Return a request as the model has it. Raises what is wrong with it."""
        prompt, marks, parser, n_dropped = request.prompt, request.marks, None, 0
        if request.messages:
            use, messages = self._tool_use(request), _for_templates(request.messages)
            if request.drops_oldest:
                count_tokens = partial(self._count_tokens, use)
                messages = leave_out_oldest(messages, self.context_tokens, count_tokens, request.max_tokens)
                n_dropped = len(request.messages) - len(messages)
            chat = use.prompt(self._rendered, messages, {}, request.sampling)
            prompt = chat.text
            parser, marks = chat.parser(), (*marks, *chat.marks)
        tokens = self.prompt_tokens(prompt) if isinstance(prompt, str) else cast("Sequence[int]", prompt)
        if not tokens:
            raise ConfigError("prompt: is empty; give at least one token")
        self.check_tokens("prompt", tokens)
        found = frozenset(token for mark in marks for token in self._control_token(mark))
        return ReadRequest(tokens, found, parser, n_dropped)

    def _count_tokens(self, use: ToolUse, messages: Sequence[dict[str, Any]]) -> int:
        return len(self.prompt_tokens(use.text(self._rendered, messages, {})))

    def _special(self, token: int) -> str:
        return self.token_bytes(token, has_control=True).decode("utf-8", "replace") if token >= 0 else ""

    def _control_token(self, text: str) -> list[int]:
        """Return the one token that a text is; none where it is several."""
        found = self.tokenize(text, add_special=False, parse_special=True)
        return found if len(found) == 1 else []


def _for_templates(messages: Sequence[Message]) -> Sequence[dict[str, Any]]:
    """Return a conversation with its calls of tools and their results as templates know them."""
    return [with_arguments(index, message) for index, message in enumerate(plain_messages(messages))]
