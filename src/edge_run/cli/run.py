"""`edge-run MODEL`: one completion, one answer, or a chat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import Cancelled, ConfigError
from edge_run.base.results import to_json
from edge_run.cli.answer import follow, opened, say_figures, show
from edge_run.cli.chat import Chat, PlainTalk, TemplateTalk
from edge_run.cli.commands import SettingsCommand
from edge_run.cli.options import SETTINGS
from edge_run.cli.settings import RunSettings, report, resolve
from edge_run.cli.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.model import Model

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
    options_metavar="[OPTIONS]",
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
    prompt = settings.prompt
    if prompt is None and not terminal.can_ask:
        prompt = terminal.read_all()
    _check(settings, prompt)
    with opened(settings.model, settings.config, terminal, settings.chat_template, settings.is_json) as model:
        goes_on = terminal.can_ask and not settings.is_json
        if prompt is None or (settings.is_chat and goes_on):
            Chat(model, _talk(settings, model, is_chat=model.has_chat_template), terminal).run(prompt)
        else:
            _answer_once(settings, model, terminal, prompt)


def _check(settings: RunSettings, prompt: str | None) -> None:
    if prompt is None and settings.is_json:
        raise ConfigError("--json: needs a prompt; give one with -p, -f or standard input")
    if prompt is not None and settings.system_prompt and not settings.is_chat:
        raise ConfigError("system prompt: is part of a chat; add -cnv, or write it into the prompt")


def _talk(settings: RunSettings, model: Model, is_chat: bool) -> TemplateTalk | PlainTalk:
    kind = TemplateTalk if (is_chat if settings.is_chat is None else settings.is_chat) else PlainTalk
    return kind(model, settings.system_prompt or "", settings.max_tokens, settings.sampling)


def _answer_once(settings: RunSettings, model: Model, terminal: Terminal, prompt: str) -> None:
    stream = _talk(settings, model, is_chat=False).ask(prompt)
    if settings.is_json:
        answer = follow(stream, model, lambda _: None)
        if answer.generation is not None:
            terminal.write_json(to_json(answer.generation))
    else:
        answer = show(stream, model, terminal, before=prompt if settings.shows_prompt else "")
        say_figures(answer, terminal)
    if answer.generation is None or answer.generation.finish_reason == "cancelled":
        raise Cancelled("the answer was stopped")
