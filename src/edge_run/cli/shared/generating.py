"""What `run` and `chat` do once their settings are resolved: one completion, one answer, or a chat."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.config import PROMPT_CACHE_ON
from edge_run.base.errors import Cancelled, ConfigError, NotSupported
from edge_run.base.strict_json import to_json
from edge_run.cli.shared.answer import NOTICE, WrittenAnswer, follow, opened, say_figures, say_notices, show
from edge_run.cli.shared.chat import Chat
from edge_run.cli.shared.conversation_book import ConversationBook
from edge_run.cli.shared.settings import RunSettings
from edge_run.cli.shared.talks import PlainTalk, TemplateTalk
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.base.mesh import MeshOptions
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.stream import Stream
    from edge_run.runtime.keeping.conversations import Conversation


def is_interactive(settings: RunSettings, terminal: Terminal) -> bool:
    """Return whether the user goes on after the first answer."""
    goes_on = terminal.can_ask and not settings.is_json
    return settings.prompt is None or bool(settings.is_chat and goes_on)


def answer_once(settings: RunSettings, terminal: Terminal) -> None:
    """Open the model, continue the prompt once, and write the answer."""
    with _model(settings, terminal) as model:
        stream = talk_of(settings, model, is_chat_by_default=False).ask(settings.prompt or "")
        _write(settings, stream, model, terminal)


def chat(settings: RunSettings, terminal: Terminal, continued: Conversation | None = None) -> None:
    """Open the model, and answer what the user writes until the user leaves. continued: what the chat goes on with."""
    is_first = settings.config.prompt_cache == PROMPT_CACHE_ON and not os.path.exists(settings.config.prompt_folder)
    with _model(settings, terminal) as model, _book(settings, model) as book:
        if is_first and book and os.path.exists(settings.config.prompt_folder):
            terminal.say(
                f"Chats are kept in {settings.config.prompt_folder}, to go on with edge-run chat --continue; "
                "--prompt-cache off keeps none, edge-run sessions rm --all erases all.",
                NOTICE,
            )
        talk = talk_of(settings, model, is_chat_by_default=model.has_chat_template)
        loop = Chat(model, talk, terminal, book)
        if continued:
            loop.resume(continued)
        loop.run(settings.prompt)


@contextlib.contextmanager
def _book(settings: RunSettings, model: Model) -> Iterator[ConversationBook | None]:
    """Have what keeps the conversation for a block; None where nothing is to be kept."""
    if not settings.config.keeps_prompts or settings.is_mesh:
        yield None
        return
    with contextlib.closing(ConversationBook(settings.config.prompt_folder, settings.model, model)) as book:
        yield book


def with_prompt_cache(settings: RunSettings) -> RunSettings:
    """Return the settings of a chat, in which prompts are kept unless somebody said otherwise."""
    if settings.is_mesh:
        return settings
    return dataclasses.replace(settings, config=dataclasses.replace(settings.config, prompt_cache=PROMPT_CACHE_ON))


def mesh_options(settings: RunSettings, terminal: Terminal) -> MeshOptions:
    """Return how a run uses the mesh that this device joined; what happens to it is said on standard error."""
    from edge_run.base.mesh import MeshOptions

    return MeshOptions(
        takes_any_numerics=settings.takes_any_numerics, say=lambda text: terminal.say(f"mesh: {text}", NOTICE)
    )


def talk_of(settings: RunSettings, model: Model, *, is_chat_by_default: bool) -> TemplateTalk | PlainTalk:
    """Return how the user and the model talk. Raises NotSupported for a chat of a model without a template."""
    is_chat = is_chat_by_default if settings.is_chat is None else settings.is_chat
    if is_chat and not model.has_chat_template:
        raise NotSupported(f"{settings.model}: has no chat template; give one with --chat-template, or leave out -cnv")
    kind = TemplateTalk if is_chat else PlainTalk
    return kind(model, settings.system_prompt or "", settings.max_tokens, settings.sampling)


def continued_model(conversation: Conversation, given: Path | None) -> Path:
    """Return the model that a conversation goes on with. Raises ConfigError where another one was given."""
    model = Path(conversation.model)
    if given is not None and given.resolve() != model.resolve():
        raise ConfigError(f"--continue: the latest chat was with {model}, not with {given}; name that one, or none")
    return model


def _model(settings: RunSettings, terminal: Terminal) -> contextlib.AbstractContextManager[Model]:
    mesh = mesh_options(settings, terminal) if settings.is_mesh else None
    return opened(settings.model, settings.config, terminal, settings.chat_template, settings.is_json, mesh)


def _write(settings: RunSettings, stream: Stream, model: Model, terminal: Terminal) -> None:
    answer: WrittenAnswer
    n_said = len(model.notices)
    if settings.is_json:
        answer = follow(stream, model, lambda _: None)
        if answer.generation is not None:
            terminal.write_json(to_json(answer.generation))
    else:
        answer = show(stream, model, terminal, before=settings.prompt or "" if settings.shows_prompt else "")
        say_figures(answer, terminal)
    say_notices(model, terminal, n_said)
    if answer.is_stopped:
        raise Cancelled("the answer was stopped")
