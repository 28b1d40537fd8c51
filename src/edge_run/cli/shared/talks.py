"""How a user and a model talk: in messages, or in a text that both write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.request import Message
    from edge_run.runtime.generation.stream import Stream

TEXT = "text"  # the role of a plain text


class MessageTalk(ABC):
    """Messages in turn, after what the system says, which stays."""

    when_full = "/drop leaves out its oldest turns, /clear begins anew"

    def __init__(self, system_prompt: str) -> None:
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = list(self._system)

    def with_message(self, text: str) -> list[dict[str, str]]:
        """Return the conversation with the message `text`, which is to be answered."""
        return [*self._messages, {"role": "user", "content": text}]

    @abstractmethod
    def without_oldest(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation less its oldest turns; as it is where it has but one."""

    def keep(self, text: str, answer: str) -> None:
        """Make both messages part of the conversation. answer: what was said, without thoughts."""
        self._messages = [*self.with_message(text), {"role": "assistant", "content": answer}]

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """What was said so far, as (role, text)."""
        return tuple((message["role"], message["content"]) for message in self._messages)

    def drop(self, text: str | None) -> int:
        """Leave out the oldest turns, of a conversation that goes on with the message `text` if there is one.

        Returns how many messages those were; 0 where there is but one turn.
        """
        n_following = text is not None
        kept = self.without_oldest(self._messages if text is None else self.with_message(text))
        n_kept = len(kept) - n_following
        n_dropped, self._messages = len(self._messages) - n_kept, [dict(one) for one in kept[:n_kept]]
        return n_dropped

    def undo(self) -> tuple[str, str] | None:
        """Take back the last message and its answer, and return both, for `keep`; None where there is none."""
        if [message["role"] for message in self._messages[-2:]] != ["user", "assistant"]:
            return None
        *self._messages, asked, answered = self._messages
        return asked["content"], answered["content"]

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self._messages = list(self._system)


class TemplateTalk(MessageTalk):
    """Messages, put into words by the model's chat template."""

    hint = "Write a message; /help says what else."

    def __init__(self, model: Model, system_prompt: str, max_tokens: int | None, sampling: SamplingConfig) -> None:
        super().__init__(system_prompt)
        self._model, self._max_tokens, self._sampling = model, max_tokens, sampling

    def ask(self, text: str) -> Stream:
        """Begin to answer the message `text`. Raises NotSupported where there is no template."""
        return self._model.stream_chat(self.with_message(text), max_tokens=self._max_tokens, sampling=self._sampling)

    def tokens(self) -> list[int]:
        """Return what the model reads of what was said so far. Raises ConfigError where nothing was."""
        return self._model.prompt_tokens(self._model.chat_prompt(self._messages))

    def without_oldest(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation less so many of its oldest turns that half of the context is free, if that can be."""
        return self._model.without_oldest(messages)

    def resume(self, parts: Sequence[tuple[str, str]]) -> None:
        """Go on after what was said, with its system prompt. Raises ConfigError where that was a plain text."""
        if any(role == TEXT for role, _ in parts):
            raise ConfigError("this conversation is a plain text, not a chat; go on with it with -no-cnv")
        self._messages = [{"role": role, "content": text} for role, text in parts]
        self._system = [message for message in self._messages if message["role"] == "system"]


class PlainTalk:
    """A text that the user and the model write in turn."""

    hint = "This model continues the text that you write; Return alone lets it go on, /help says what else."
    when_full = "/clear begins anew"

    def __init__(self, model: Model, beginning: str, max_tokens: int | None, sampling: SamplingConfig) -> None:
        self._model, self._max_tokens, self._sampling = model, max_tokens, sampling
        self._beginning = self._text = beginning
        self._turns = list[tuple[int, str]]()  # how long the text was before each, and what the user wrote

    def ask(self, text: str) -> Stream:
        """Begin to continue the text so far with `text` after it."""
        return self._model.generate(self._joined(text), max_tokens=self._max_tokens, sampling=self._sampling)

    def tokens(self) -> list[int]:
        """Return what the model reads of what was written so far."""
        return self._model.prompt_tokens(self._text)

    def keep(self, text: str, answer: str) -> None:
        """Make both part of the text."""
        self._turns.append((len(self._text), text))
        self._text = self._joined(text) + answer

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """What was written so far, for `resume`."""
        return ((TEXT, self._text),)

    def resume(self, parts: Sequence[tuple[str, str]]) -> None:
        """Go on after what was written. Raises ConfigError where that was a chat."""
        if [role for role, _ in parts] != [TEXT]:
            how = "-cnv" if self._model.has_chat_template else "the --chat-template that it had"
            raise ConfigError(f"this conversation is a chat, not a plain text; go on with it with {how}")
        self._text = parts[0][1]
        self._turns.clear()

    def drop(self, text: str | None) -> int:
        """Return 0: a plain text has no turns."""
        return 0

    def undo(self) -> tuple[str, str] | None:
        """Take back what the user wrote last and what followed, and return both, for `keep`; None for nothing."""
        if not self._turns:
            return None
        n_letters, asked = self._turns.pop()
        whole, self._text = self._text, self._text[:n_letters]
        return asked, whole[len(self._joined(asked)) :]

    def clear(self) -> None:
        """Begin again."""
        self._text = self._beginning
        self._turns.clear()

    def _joined(self, text: str) -> str:
        is_apart = not self._text or not text or self._text[-1].isspace() or text[0].isspace()
        return self._text + text if is_apart else f"{self._text} {text}"


Talk: TypeAlias = TemplateTalk | PlainTalk
