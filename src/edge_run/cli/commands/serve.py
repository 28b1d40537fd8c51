"""`edge-run serve`: a model behind HTTP, or the models of a folder, one open at a time."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import edge_run
from edge_run.base.config import PACKED_OFF, POOLING
from edge_run.base.errors import ConfigError, reason_of
from edge_run.base.extras import SERVE, need
from edge_run.base.files.key_files import MOST_KEY_FILE_BYTES, tell_if_open
from edge_run.base.files.texts import read_text_file
from edge_run.base.interrupt import Interrupt
from edge_run.cli.shared.answer import open_file, say_plan
from edge_run.cli.shared.generating import mesh_options
from edge_run.cli.shared.options import SERVED_SETTINGS, SETTINGS
from edge_run.cli.shared.setting import PATH, NumberRange
from edge_run.cli.shared.settings import RunSettings, report, resolve
from edge_run.cli.shared.settings_command import SettingsCommand, origin
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.generation.model import Model

PARALLEL = 4
HOST, PORT, MAX_QUEUE = "127.0.0.1", 8080, 64
NOTIFY_SOCKET = "NOTIFY_SOCKET"  # where systemd hears how a service stands
_FILE: dict[str, Any] = {"type": PATH, "metavar": "FILE"}
_OF_ONE_MODEL = ("draft", "chat_template", "packed", "mesh")


@click.command(
    "serve",
    cls=SettingsCommand,
    params=[
        click.Argument(["model_file"], metavar="[MODEL]", required=False, type=PATH),
        click.Option(
            ["--models"],
            type=PATH,
            metavar="FOLDER",
            help="Serve the GGUF files of FOLDER instead, the one open that is asked for; SIGHUP looks for others.",
        ),
        click.Option(
            ["--host"],
            default=HOST,
            metavar="HOST",
            help=f"Where to listen; 0.0.0.0 is everywhere, and needs a key.  [default: {HOST}]",
        ),
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=PORT,
            metavar="N",
            help=f"0: any that is free, which is said.  [default: {PORT}]",
        ),
        click.Option(
            ["--api-key-file"],
            help="Who has no key of this file, one a line of 8 signs or more, is refused; SIGHUP reads it anew.",
            **_FILE,
        ),
        click.Option(
            ["--allow-origin"],
            multiple=True,
            metavar="ORIGIN",
            help="Pages of this site may ask, as https://example.org; may be repeated.",
        ),
        click.Option(
            ["--allow-host"],
            multiple=True,
            metavar="NAME",
            help="The server is known by this name too, as behind a proxy; may be repeated.",
        ),
        click.Option(
            ["--max-queue"],
            type=click.IntRange(0, 100_000),
            default=MAX_QUEUE,
            metavar="N",
            help=f"Requests that may wait; others are told when to come again.  [default: {MAX_QUEUE}]",
        ),
        click.Option(
            ["--parallel"],
            type=click.IntRange(1, 256),
            metavar="N",
            help="Answers, or texts, that share a pass at most.  "
            f"[default: {PARALLEL}, or 1 on a mesh, with --kv-spill, --kv-keep or --context-shift]",
        ),
        click.Option(
            ["--embeddings/--no-embeddings"],
            default=None,
            help="Serve the vectors of texts instead of answers.  [default: where the file is made for that, as an "
            "encoder]",
        ),
        click.Option(
            ["--pooling"],
            type=click.Choice(POOLING),
            default=POOLING[0],
            help="How one vector is made of a text's tokens, as of embed.  [default: auto]",
        ),
        click.Option(
            ["--drain"],
            type=NumberRange(0, 3600),
            default=30.0,
            metavar="SECONDS",
            help="How long answers may go on after Ctrl-C or SIGTERM.  [default: 30.0]",
        ),
        click.Option(["--metrics"], is_flag=True, help="Figures for Prometheus at /metrics."),
        click.Option(["--tls-cert"], help="Certificate chain, for HTTPS.", **_FILE),
        click.Option(["--tls-key"], help="The key of the certificate.", **_FILE),
        *SERVED_SETTINGS,
    ],
    short_help="Serve a model over HTTP.",
)
@click.pass_context
def serve(context: click.Context, /, host: str, port: int, **given: Any) -> None:
    """Serve the GGUF file MODEL, or those of a folder, to clients of OpenAI's API and others, until Ctrl-C.

    Sampling settings are for requests that say nothing; -n is the most that an answer may have. Needs the `serve`
    extra.
    """
    for module in ("uvicorn", "starlette", "msgspec", *(["prometheus_client"] if given["metrics"] else [])):
        need(module, SERVE)
    import anyio

    from edge_run.devices.host.service_manager import ServiceManager
    from edge_run.runtime.server.access import Access, access_for, read_keys
    from edge_run.runtime.server.serving import ServeOptions, bind, serve_folder, serve_model

    terminal: Terminal = context.obj
    folder: Path | None = given["models"]
    settings = resolve(context, {**{s.name: None for s in SETTINGS}, **given, **_what(context, given)})
    config = dataclasses.replace(
        settings.config,
        sequences=given["parallel"] or _usual_parallel(settings),
        embeddings=given["embeddings"],
        pooling=given["pooling"],
    )
    _check_certificate(given["tls_cert"], given["tls_key"])
    report(context, terminal, config, settings.sampling)
    with bind(host, port) as bound:

        def read_access() -> Access:
            keys: list[str] = []
            for secret in (given["api_key_file"], given["tls_key"]):
                if secret is not None:
                    tell_if_open(secret, terminal.say)
            if (file := given["api_key_file"]) is not None:
                where = f"--api-key-file {file}"
                keys = read_keys(read_text_file(file, where, MOST_KEY_FILE_BYTES), where)
            return access_for(host, bound.getsockname()[0], given["allow_host"], given["allow_origin"], keys)

        options = ServeOptions(
            read_access(),
            given["max_queue"],
            settings.sampling,
            settings.max_tokens,
            given["drain"],
            given["tls_cert"],
            given["tls_key"],
            edge_run.__version__,
            given["metrics"],
            read_access,
            ServiceManager(os.environ.get(NOTIFY_SOCKET)),
        )
        if folder is not None:
            anyio.run(serve_folder, settings.model, partial(open_file, config=config), bound, options, terminal.say)
            return
        mesh = mesh_options(settings, terminal) if settings.is_mesh else None

        def open_aloud(path: Path, interrupt: Interrupt) -> Model:
            model = open_file(path, interrupt, config, settings.chat_template, mesh)
            say_plan(model, config, terminal)
            return model

        terminal.show(f"Opening {settings.model.name}")
        anyio.run(serve_model, settings.model, open_aloud, bound, options, terminal.say)


def _what(context: click.Context, given: dict[str, Any]) -> dict[str, Path | str | None]:
    """Return the file or folder to be served; with a folder, settings that are of one model are left out.

    Raises ConfigError for both, and for flags that are of one model.
    """
    folder: Path | None = given["models"]
    if folder is None:
        return {}
    if given["model_file"] is not None:
        raise ConfigError("MODEL and --models: exclude each other; give one")
    of_one_model = {name: f"--{name.replace('_', '-')}" for name in _OF_ONE_MODEL if given[name]}
    if given["packed"] == PACKED_OFF:
        del of_one_model["packed"]
    if given["speculate"] == "draft":  # by a model that goes with one alone
        of_one_model["speculate"] = "--speculate draft"
    if given["also"] and given["also"].is_file():  # a folder may have a copy of each
        of_one_model["also"] = "--also FILE"
    for name, flag in of_one_model.items():
        if origin(context, name) == "flag":
            raise ConfigError(f"--models and {flag}: exclude each other, as {flag} is of one model")
    return {"model_file": folder, **dict.fromkeys(of_one_model)}


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise ConfigError for files that TLS cannot use, before a model is opened for them."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: belong together; give both")
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigError(f"--tls-cert {certificate} --tls-key {key}: {reason_of(error)}") from error


def _usual_parallel(settings: RunSettings) -> int:
    """Return how many answers share a pass where nobody said: one, where others would take context from it."""
    config = settings.config
    is_alone = settings.is_mesh or config.spills_kv or config.context_shift or config.kv_keep
    return 1 if is_alone else PARALLEL
