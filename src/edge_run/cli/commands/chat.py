"""`edge-run chat`: a chat, which may go on with one that was kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.config import PROMPT_CACHE_ON
from edge_run.base.errors import ConfigError
from edge_run.cli.shared.generating import chat as chat_with
from edge_run.cli.shared.generating import continued_model, with_prompt_cache
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.server_options import SERVER_OPTIONS, asked_server
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings import given_sampling, model_config, report, resolve, without_outranked
from edge_run.cli.shared.settings_command import SettingsCommand, origin
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.client.connection import ServerAddress

_MODEL = click.Argument(["model_file"], metavar="[MODEL]", required=False, type=PATH)
_CONTINUE = click.Option(
    ["--continue", "goes_on"], is_flag=True, help="Go on with the latest conversation, and its model."
)
_SETTINGS = [setting for setting in SETTINGS if setting.name != "json"]
_OPENAI = "api.openai.com"  # whose newer models refuse the name that all other servers know


@click.command(
    "chat",
    cls=SettingsCommand,
    params=[_MODEL, _CONTINUE, *SERVER_OPTIONS, *_SETTINGS],
    short_help="Chat, or go on with a chat.",
)
@click.pass_context
def chat(context: click.Context, /, **given: Any) -> None:
    """Chat with the GGUF file MODEL; each conversation is kept after each answer (edge-run sessions).

    With --server, MODEL is the name of a model that the server has; nothing is kept.
    """
    terminal: Terminal = context.obj
    values = without_outranked(context, {**given, "json": False})
    if (values["goes_on"] or values["server"]) and origin(context, "model") != "flag":
        values["model"] = None  # that of a configuration is no name at a server, nor that of the chat which goes on
    if (address := asked_server(context, values)) is not None:
        _chat_with_server(context, address, values, terminal)
        return
    continued = None
    if values.pop("goes_on"):
        from edge_run.runtime.keeping.conversations import Conversations

        if origin(context, "system_prompt") == "flag":
            raise ConfigError("--continue and --system-prompt: exclude each other, as the chat has one; leave one out")
        continued = Conversations(prompt_folder(context, values)).latest()
        model = continued_model(continued, values["model_file"] or values["model"])
        values.update(model_file=model, model=None)
    settings = resolve(context, values)
    if given["prompt_cache"] is None:
        settings = with_prompt_cache(settings)
    report(context, terminal, settings.config, settings.sampling)
    chat_with(settings, terminal, continued)


def _chat_with_server(
    context: click.Context, address: ServerAddress, values: dict[str, Any], terminal: Terminal
) -> None:
    """Chat with what a server has. Raises ConfigError and ProtocolError where it cannot be asked."""
    from edge_run.cli.shared.server_chat import ServerChat
    from edge_run.runtime.client.connection import ServerClient

    name = values["model_file"] or values["model"]
    nothing = Path()  # is kept here, also where the user has no home
    settings = resolve(context, {**values, "model_file": name or nothing, "model": None, "cache_dir": nothing})
    report(context, terminal)
    body = given_sampling(context, values)
    if settings.max_tokens is not None:
        body["max_completion_tokens" if address.host == _OPENAI else "max_tokens"] = settings.max_tokens
    client = ServerClient(address)
    found = client.get("/v1/models")
    names = _model_names(found)
    if name is not None or names:
        body["model"] = str(name or names[0])
    terminal.say(f"{body.get('model', 'a model')} at {address}")
    ServerChat(client, body, settings.system_prompt or "", terminal).run(settings.prompt)


def _model_names(document: Any) -> list[str]:
    """Return the names of models in a server's list of them, whatever else it is: first those that are open."""
    listed = document.get("data") if isinstance(document, dict) else None
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    found.sort(key=lambda one: not _is_loaded(one))  # edge-run has one open at a time, which others may be using
    return [name for one in found if isinstance(name := one.get("id"), str)]


def _is_loaded(model: dict[str, Any]) -> bool:
    status = model.get("status")
    return isinstance(status, dict) and status.get("value") == "loaded"


def prompt_folder(context: click.Context, values: dict[str, Any]) -> Path:
    """Return where conversations are kept. Raises ConfigError where they are not."""
    config = model_config(context, values, prompt_cache=PROMPT_CACHE_ON)
    if not config.keeps_prompts:
        raise ConfigError("--continue: with --prompt-cache off nothing is kept that could go on")
    return config.prompt_folder
