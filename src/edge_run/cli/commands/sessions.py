"""`edge-run sessions`: the conversations that were kept, to be listed, read and removed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from edge_run.base.config import PROMPT_CACHE_OFF, PROMPT_CACHE_ON
from edge_run.base.errors import ConfigError
from edge_run.base.units import format_count, format_size
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.printable import one_line
from edge_run.cli.shared.settings import model_config
from edge_run.cli.shared.settings_command import CommandGroup, SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.talks import TEXT
from edge_run.cli.shared.terminal import Terminal

_WHERE = some_settings("prompt_cache", "cache_dir")
_NAME = click.Argument(["name"], metavar="NAME")
_SOME_NAME = click.Argument(["name"], metavar="[NAME]", required=False)
_ALL = click.Option(
    ["--all", "is_all"], is_flag=True, help="Remove all conversations, and all that is kept of prompts."
)


@click.command("list", cls=SettingsCommand, params=_WHERE, short_help="The conversations that were kept.")
@click.pass_context
def list_all(context: click.Context, /, **given: Any) -> None:
    """List the conversations that were kept, the latest first, and what all that is kept takes of the disk."""
    from edge_run.runtime.keeping.conversations import Conversations
    from edge_run.runtime.keeping.store import kept_bytes

    terminal: Terminal = context.obj
    folder = _folder(context, given)
    conversations = Conversations(folder)
    rows = []
    for name, changed_s in conversations.names():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(changed_s))
        try:
            one = conversations.load(name)
            first = next((text for role, text in one.parts if role != "system"), "")
            rows.append((name, when, Path(one.model).name, str(len(one.tokens)), " ".join(first.split())[:40]))
        except ConfigError:
            rows.append((name, when, "damaged", "", ""))
    lines = align([("name", "changed", "model", "tokens", "begins"), *rows]) if rows else []
    kept, where = format_size(kept_bytes(folder)), one_line(str(folder))
    lines.append(f"{format_count(len(rows), 'conversation')}; {kept} of prompts in {where}")
    terminal.write("\n".join(lines) + "\n")


@click.command("show", cls=SettingsCommand, params=[_NAME, *_WHERE], short_help="What was said in one of them.")
@click.pass_context
def show(context: click.Context, /, name: str, **given: Any) -> None:
    """Print what was said in the conversation NAME."""
    from edge_run.runtime.keeping.conversations import Conversations

    terminal: Terminal = context.obj
    for role, text in Conversations(_folder(context, given)).load(name).parts:
        terminal.write_answer(text if role == TEXT else f"{role}: {text}")
        terminal.end_line()


@click.command("rm", cls=SettingsCommand, params=[_SOME_NAME, _ALL, *_WHERE], short_help="Remove one, or everything.")
@click.pass_context
def remove(context: click.Context, /, name: str | None, is_all: bool, **given: Any) -> None:
    """Remove the conversation NAME, or with --all every conversation and all that is kept of prompts."""
    from edge_run.runtime.keeping.conversations import Conversations
    from edge_run.runtime.keeping.store import erase

    terminal: Terminal = context.obj
    if is_all == (name is not None):
        raise ConfigError("sessions rm: give a name, or --all")
    folder = _folder(context, given)
    conversations = Conversations(folder)
    if name is not None:
        if not conversations.remove(name):
            raise ConfigError(f"{name}: no such conversation; edge-run sessions list names all")
        terminal.write(f"removed: {name}; its rows stay until room is needed, or sessions rm --all\n")
        return
    removed, removed_bytes = format_count(conversations.erase(), "conversation"), erase(folder)
    terminal.write(f"removed: {removed}, {format_size(removed_bytes)} of prompts in {one_line(str(folder))}\n")
    if left := [name for name, _ in conversations.names()]:
        terminal.say(f"left: {', '.join(left)}: not written by edge-run, or damaged; sessions rm NAME removes one")


def _folder(context: click.Context, given: dict[str, Any]) -> Path:
    """Return where conversations are; `off` only means that no more are to be kept there."""
    place = given["prompt_cache"]
    values = {**given, "prompt_cache": None if place == PROMPT_CACHE_OFF else place}
    return model_config(context, values, prompt_cache=PROMPT_CACHE_ON).prompt_folder


sessions = CommandGroup(
    "sessions",
    {"list": f"{__name__}:list_all", "show": f"{__name__}:show", "rm": f"{__name__}:remove"},
    help="Conversations that were kept: list, show, remove.",
)
