"""`edge-run chat`: a chat, which may go on with one that was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.config import PROMPT_CACHE_ON
from edge_run.base.errors import ConfigError
from edge_run.cli.shared.generating import chat as chat_with
from edge_run.cli.shared.generating import continued_model, with_prompt_cache
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.settings import model_config, report, resolve
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

_MODEL = click.Argument(["model_file"], metavar="[MODEL]", required=False, type=click.Path(path_type=Path))
_CONTINUE = click.Option(
    ["--continue", "goes_on"], is_flag=True, help="Go on with the latest conversation, and its model."
)
_SETTINGS = [setting for setting in SETTINGS if setting.name != "json"]


@click.command(
    "chat",
    cls=SettingsCommand,
    params=[_MODEL, _CONTINUE, *_SETTINGS],
    short_help="Chat, or go on with a chat.",
)
@click.pass_context
def chat(context: click.Context, /, **given: Any) -> None:
    """Chat with the GGUF file MODEL; each conversation is kept after each answer (edge-run sessions)."""
    terminal: Terminal = context.obj
    values = {**given, "json": False}
    continued = None
    if values.pop("goes_on"):
        from edge_run.runtime.keeping.conversations import Conversations

        continued = Conversations(prompt_folder(context, values)).latest()
        values["model_file"] = continued_model(continued, values["model_file"] or values["model"])
    settings = resolve(context, values)
    if given["prompt_cache"] is None:
        settings = with_prompt_cache(settings)
    report(context, terminal, settings.config, settings.sampling)
    chat_with(settings, terminal, continued)


def prompt_folder(context: click.Context, values: dict[str, Any]) -> Path:
    """Return where conversations are kept. Raises ConfigError where they are not."""
    config = model_config(context, values, prompt_cache=PROMPT_CACHE_ON)
    if not config.keeps_prompts:
        raise ConfigError("--continue: with --prompt-cache off nothing is kept that could go on")
    return config.prompt_folder
