"""`edge-run MODEL`: one completion, one answer, or a chat."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import Cancelled, ConfigError, NotSupported
from edge_run.base.results import to_json
from edge_run.cli.shared.answer import NOTICE, follow, opened, say_figures, show
from edge_run.cli.shared.chat import Chat, PlainTalk, TemplateTalk
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES, RunSettings, report, resolve
from edge_run.cli.shared.settings_command import SettingsCommand, origin
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.stream import Stream
    from edge_run.runtime.mesh.opening import MeshOptions

_MODEL = click.Argument(["model_file"], metavar="MODEL", required=False, type=click.Path(path_type=Path))
_EPILOG = """
Settings may also come from the environment (EDGE_RUN_CTX_SIZE for --ctx-size, and so on for each first long name) and
from ~/.config/edge-run/config.toml (ctx-size = 8192). Flags win over the environment, and that over the file.
"""


@click.command(
    cls=SettingsCommand,
    params=[_MODEL, *SETTINGS],
    short_help="Chat, or continue a text.",
    epilog=_EPILOG,
)
@click.pass_context
def run(context: click.Context, /, **given: Any) -> None:
    """Generate text with the GGUF file MODEL (the first one, where it has several).

    With a prompt (-p, -f or standard input) it is continued once. Without one this is a chat: with the template that
    the model brings, or plain text that goes on and on where it brings none.
    """
    terminal: Terminal = context.obj
    settings = resolve(context, given)
    report(context, terminal, settings.config, settings.sampling)
    if settings.prompt is None and not terminal.can_ask:
        settings = dataclasses.replace(settings, prompt=terminal.read_all(MOST_PROMPT_BYTES))
    settings = _without_system_prompt(context, settings)
    if settings.prompt is None and settings.is_json:
        raise ConfigError("--json: needs a prompt; give one with -p, -f or standard input")
    mesh = mesh_options(settings, terminal) if settings.is_mesh else None
    with opened(settings.model, settings.config, terminal, settings.chat_template, settings.is_json, mesh) as model:
        goes_on = terminal.can_ask and not settings.is_json
        if settings.prompt is None or (settings.is_chat and goes_on):
            Chat(model, _talk(settings, model, model.has_chat_template), terminal).run(settings.prompt)
        else:
            _answer_once(settings, _talk(settings, model, False).ask(settings.prompt), model, terminal)


def mesh_options(settings: RunSettings, terminal: Terminal) -> MeshOptions:
    """Return how a run uses the mesh that this device joined; what happens to it is said on standard error."""
    from edge_run.runtime.mesh.engine import RunOptions
    from edge_run.runtime.mesh.opening import MeshOptions

    def say(text: str) -> None:
        terminal.erase()
        terminal.say(f"mesh: {text}", NOTICE)

    return MeshOptions("", run=RunOptions(settings.takes_any_numerics, say))


def _without_system_prompt(context: click.Context, settings: RunSettings) -> RunSettings:
    """Return `settings` for a completion without the system prompt; raise ConfigError for one that was meant for it."""
    if settings.prompt is None or settings.is_chat or not settings.system_prompt:
        return settings
    if origin(context, "system_prompt") == "flag":
        raise ConfigError("system prompt: is part of a chat; add -cnv, or write it into the prompt")
    return dataclasses.replace(settings, system_prompt=None)


def _talk(settings: RunSettings, model: Model, is_chat_by_default: bool) -> TemplateTalk | PlainTalk:
    is_chat = is_chat_by_default if settings.is_chat is None else settings.is_chat
    if is_chat and not model.has_chat_template:
        raise NotSupported(f"{settings.model}: has no chat template; give one with --chat-template, or leave out -cnv")
    kind = TemplateTalk if is_chat else PlainTalk
    return kind(model, settings.system_prompt or "", settings.max_tokens, settings.sampling)


def _answer_once(settings: RunSettings, stream: Stream, model: Model, terminal: Terminal) -> None:
    if settings.is_json:
        answer = follow(stream, model, lambda _: None)
        if answer.generation is not None:
            terminal.write_json(to_json(answer.generation))
    else:
        answer = show(stream, model, terminal, before=settings.prompt or "" if settings.shows_prompt else "")
        say_figures(answer, terminal)
    if answer.generation is None or answer.generation.finish_reason == "cancelled":
        raise Cancelled("the answer was stopped")
