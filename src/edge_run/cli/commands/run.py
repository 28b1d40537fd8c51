"""`edge-run MODEL`: one completion, one answer, or a chat."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.cli.shared.generating import answer_once, chat, is_interactive, with_prompt_cache
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES, RunSettings, report, resolve
from edge_run.cli.shared.settings_command import SettingsCommand, origin
from edge_run.cli.shared.terminal import PROMPT_GIVEN, Terminal

_MODEL = click.Argument(["model_file"], metavar="MODEL", required=False, type=PATH)
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
    if settings.is_json and settings.shows_prompt and origin(context, "display_prompt") == "flag":
        raise ConfigError("--display-prompt and --json: exclude each other, as JSON has the answer alone; give one")
    if settings.prompt is None and not terminal.can_ask:
        prompt = terminal.read_all(MOST_PROMPT_BYTES, "give one with -p, or start at a terminal to chat")
        settings = dataclasses.replace(settings, prompt=prompt)
    settings = _without_system_prompt(context, settings)
    if settings.prompt is None and settings.is_json:
        if origin(context, "json") == "flag":
            raise ConfigError("--json: needs a prompt; give one with -p, -f or standard input")
        settings = dataclasses.replace(settings, is_json=False)  # which a configuration says of other commands
    is_chat = is_interactive(settings, terminal)
    if is_chat and given["prompt_cache"] is None:
        settings = with_prompt_cache(settings)
    report(context, terminal, settings.config, settings.sampling)
    if is_chat:
        chat(settings, terminal)
    else:
        answer_once(settings, terminal)
        terminal.say_unread(PROMPT_GIVEN, [given["file"]] if given["file"] else ())


def _without_system_prompt(context: click.Context, settings: RunSettings) -> RunSettings:
    """Return `settings` for a completion without the system prompt; raise ConfigError for one that was meant for it."""
    if settings.prompt is None or settings.is_chat or not settings.system_prompt:
        return settings
    if origin(context, "system_prompt") == "flag":
        raise ConfigError("system prompt: is part of a chat; add -cnv, or write it into the prompt")
    return dataclasses.replace(settings, system_prompt=None)
