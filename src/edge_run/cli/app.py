"""The entry: which command an invocation means, and how it ends."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

import edge_run
from edge_run.base.errors import (
    Cancelled,
    ConfigError,
    EdgeRunError,
    TierReadError,
    less_memory,
    options_as_flags,
    reason_of,
)
from edge_run.cli.shared.process import (
    end_on_termination,
    leave_threads,
    prepare_streams,
    printable_notices,
    release_streams,
)
from edge_run.cli.shared.settings_command import HELP_NAMES, CommandGroup, origin
from edge_run.cli.shared.terminal import Terminal

NAME = "edge-run"
_SINGLE = (
    *("run", "chat", "sessions", "serve", "batch", "embed", "plan", "demo", "inflate", "pack"),
    *("doctor", "probe", "bench", "trace", "replay"),
)
_GROUPS = ("split", "mesh")
COMMANDS = {name: f"edge_run.cli.commands.{name}" for name in _SINGLE} | {
    name: f"edge_run.cli.{name}.group" for name in _GROUPS
}
SIGPIPE_CODE = 141
_ELSEWHERE = {"help": "--help", "version": "--version"}  # which other programs have as commands
_LIKE = 0.75  # of 1: how much a word has to look like a command's name

_HELP = """Run GGUF models that are larger than memory, inside a memory budget; the text is llama.cpp's.

\b
  edge-run model.gguf                          chat
  edge-run model.gguf -p "Once" -n 64          continue a text
  edge-run model.gguf --memory 4GiB < prompt   within a budget
  edge-run run --help                          all options

A model file that is named like a command is ./NAME.
"""
_EPILOG = """\b
Exit codes:
  0    done
  1    an error that has no code of its own
  2    a flag, setting or argument that cannot be
  3    the model file: missing, truncated, foreign, changed
  4    a memory budget that cannot work
  5    a read or a write that the storage refused
  6    llama.cpp refused, failed, or is not the one we know
  7    a right request that this model or device cannot serve
  8    the prompt is longer than the context
  9    what came over the network is malformed or foreign
  10   the mesh cannot do it: no broker, another device leads, a member refused
  11   a device of the mesh ended, froze, or was cut off
  12   a device, a key or a model that nobody allowed
  13   a packed file: another model's, damaged, or not to be read
  130  stopped with Ctrl-C
  141  nobody read the output any more
  143  ended by SIGTERM (129: by SIGHUP)
"""


class Commands(CommandGroup):
    """All commands; what does not begin with the name of one is a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` where no command is named."""
        if args and args[0] not in self.homes and args[0] not in (*HELP_NAMES, "--version"):
            if not ctx.resilient_parsing:  # as when a shell completes a line
                _refuse_misspelled(args[0])
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what the usage line shows after the program's name."""
        return ["MODEL [OPTIONS]", "| COMMAND ..."]


def _refuse_misspelled(word: str) -> None:
    """Raise ConfigError for what looks like a command's name that was mistyped, and is no file."""
    if not word.isalpha() or os.path.lexists(word):
        return
    import difflib  # which takes long to load

    near = _ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, COMMANDS, 1, _LIKE)), None)
    if near:
        raise ConfigError(f"{word}: no such command, and no such file; did you mean edge-run {near}?")


@click.group(
    cls=Commands,
    homes=COMMANDS,
    help=_HELP,
    epilog=_EPILOG,
    context_settings={"help_option_names": HELP_NAMES, "max_content_width": 100},
)
@click.version_option(edge_run.__version__, prog_name=NAME, message="%(prog)s %(version)s")
def app() -> None:
    """Give the commands a common name; each does its own work."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `args`, by default this process's, and exit with its code."""
    prepare_streams()
    end_on_termination()
    with printable_notices():
        terminal = Terminal()
        code = _run(list(sys.argv[1:] if args is None else args), terminal)
        terminal.erase()
    release_streams()
    leave_threads(code)
    sys.exit(code)


def _flags() -> Mapping[str, str]:
    """Return the flags of what Python calls otherwise."""
    from edge_run.cli.shared.options import FLAGS  # here, as few command lines need one

    return FLAGS


@options_as_flags(_flags)
def _run(args: list[str], terminal: Terminal) -> int:
    """Return the exit code of the command line `args`; whatever goes wrong is one line on standard error."""
    try:
        with app.make_context(NAME, args, obj=terminal) as context:
            app.invoke(context)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (Cancelled, KeyboardInterrupt, click.Abort):
        return Cancelled.exit_code
    except BrokenPipeError:
        return SIGPIPE_CODE
    except Exception as error:
        message, code = _explain(error)
        terminal.say(f"{NAME}: {message}", "red")
        return code
    return 0


def _explain(error: Exception) -> tuple[str, int]:
    """Return what to say about an error, and the exit code."""
    if isinstance(error, click.ClickException):
        return _usage_message(error), error.exit_code
    if isinstance(error, EdgeRunError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        return f"{_what_failed(error)}: {reason_of(error)}", TierReadError.exit_code
    if isinstance(error, MemoryError):
        return f"out of memory; {less_memory()}", EdgeRunError.exit_code
    logging.getLogger(__name__).info("%s", traceback.format_exc())
    words = " ".join(str(error).split())
    return f"a mistake of edge-run's own: {type(error).__name__}: {words}; -v shows where", EdgeRunError.exit_code


def _what_failed(error: OSError) -> str:
    """Return what the system refused to read or write, as far as that is known."""
    if error.filename:
        return str(error.filename)
    if any(frame.f_code is click.echo.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
        return "standard output"  # which help and the version go to
    try:
        sys.stdout.flush()  # what it refused to write is still there
    except (OSError, ValueError):
        return "standard output"
    return "the system refused a read or a write"


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(error, click.UsageError):
        return message
    parameter = getattr(error, "param", None)
    if parameter is not None and parameter.name:
        place = origin(context, parameter.name)
        message += "" if place in ("flag", "default") else f" (from {place})"
    return f"{message}; see {context.command_path} --help"
