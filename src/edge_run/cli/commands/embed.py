"""`edge-run embed`: vectors of texts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.config import POOLING
from edge_run.base.errors import ConfigError, TierReadError, reason_of
from edge_run.base.files.texts import lines_of, opened_file
from edge_run.base.units import format_count
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import NOTICE, opened
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.setting import PATH, TEXT
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES, model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.embedding.results import TextVectors, Vectors

PARALLEL = 16
_SETTINGS = (
    "memory", "ctx_size", "threads", "ubatch_size", "batch_size", "kv_type", "cache_type_k", "cache_type_v",
    "flash_attn", "backend", "readers", "expert_policy", "expert_prefetch", "packed", "repack", "cache_dir",
    "check_file", "exact", "json", "verbose",
)  # fmt: skip


@click.command(
    "embed",
    cls=SettingsCommand,
    params=[
        MODEL,
        click.Argument(["files"], nargs=-1, metavar="[FILE]...", type=PATH),
        click.Option(["-p", "--prompt"], multiple=True, type=TEXT, metavar="TEXT", help="A text; may be repeated."),
        click.Option(
            ["--pooling"],
            type=click.Choice(POOLING),
            default=POOLING[0],
            help="How one vector is made of a text's tokens; none: one for each token, rank: a reranker's score; auto: "
            "what the file says, else mean for an encoder and last for other models.  [default: auto]",
        ),
        click.Option(["--normalize/--no-normalize"], default=True, help="Give vectors the length 1.  [default: yes]"),
        click.Option(["--truncate"], is_flag=True, help="Cut texts that are too long, which are refused otherwise."),
        click.Option(
            ["--parallel"],
            type=click.IntRange(1, 256),
            default=PARALLEL,
            metavar="N",
            help="Texts that share a pass at most; 1, or --exact, computes each alone, so that no text changes the "
            f"last digits of another's vector.  [default: {PARALLEL}]",
        ),
        *some_settings(*_SETTINGS),
    ],
    short_help="Make vectors of texts.",
)
@click.pass_context
def embed(context: click.Context, /, model_file: Path, files: tuple[Path, ...], **given: Any) -> None:
    """Make the vectors of texts with the GGUF file MODEL: an encoder, or any model that generates text.

    The texts come from -p, or are the lines of the FILEs, or of standard input. Each vector is a line of numbers on
    standard output, in the order of the texts; with --json it is a line of JSON with the text's number and its tokens.
    """
    terminal: Terminal = context.obj
    is_exact, parallel = bool(given["exact"]), given["parallel"]
    config = model_config(context, given, embeddings=True, pooling=given["pooling"])
    config = dataclasses.replace(config, sequences=1 if is_exact else parallel)
    texts = _texts(given["prompt"], files, terminal)
    report(context, terminal, config)

    def write(text: TextVectors) -> None:
        if given["json"]:
            terminal.write_json(_json_line(text, is_list=config.pooling == "none"))
        else:
            terminal.write("".join(f"{' '.join(map(str, row))}\n" for row in text.vectors))
        terminal.show(f"{format_count(text.number + 1, 'text')} so far (Ctrl-C stops)")

    with opened(model_file, config, terminal, is_quiet=True) as model:
        assert model.embedding is not None
        if terminal.shows_notices:
            terminal.say(figures.describe_embedding(model_file.name, model.plan, model.embedding), NOTICE)
        found = model.embed(texts, normalize=given["normalize"], truncate=given["truncate"], on_text=write)
        terminal.erase()
        if found.truncated:
            terminal.say(f"{format_count(len(found.truncated), 'text')} cut to {max(found.tokens):,} tokens")
        if terminal.shows_notices:
            terminal.say(figures.describe_embeddings(found, model.stats.load_s), NOTICE)
    terminal.say_unread("the texts are those of -p or of the files", files)


def _texts(prompts: Sequence[str], files: Sequence[Path], terminal: Terminal) -> Iterable[str]:
    """Return the texts that were given, in their order; lines are read when they are asked for, but for the first.

    Raises ConfigError for none, for both kinds, and for a file that cannot be read; iterating, for lines that are none.
    """
    if prompts and files:
        raise ConfigError("--prompt and files: exclude each other; give one of the two")
    if prompts:
        return prompts
    if not files and terminal.can_ask:
        raise ConfigError("texts: none given; give some with -p, files of lines, or standard input")
    for file in files:
        if not _is_pipe(file):  # which is read once, as that of a shell's <(...)
            with opened_file(file, str(file)):
                pass  # so that it is said before the model is opened
    texts = _file_lines(files) if files else _stdin_lines()
    first = next(texts, None)
    if first is None and files:
        raise ConfigError(f"texts: none in {', '.join(map(str, files))}; give a file with a text on each line")
    if first is None:
        raise ConfigError("texts: standard input is empty; give one with -p")
    return itertools.chain([first], texts)


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(os.path.expanduser(path)).st_mode)
    except (OSError, ValueError):  # opening it says why
        return False


def _file_lines(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        with opened_file(path, str(path)) as file:
            yield from lines_of(file, str(path), MOST_PROMPT_BYTES)


def _stdin_lines() -> Iterator[str]:
    try:
        if sys.stdin is not None:
            yield from lines_of(sys.stdin.buffer, "standard input", MOST_PROMPT_BYTES)
    except OSError as error:
        raise TierReadError(f"standard input: cannot be read ({reason_of(error)})") from error


def _json_line(text: TextVectors, *, is_list: bool) -> str:
    vectors = ", ".join(map(_json_vector, text.vectors))
    cut = ', "truncated": true' if text.is_truncated else ""
    embedding = f"[{vectors}]" if is_list else vectors
    return f'{{"index": {text.number}, "tokens": {text.tokens}{cut}, "embedding": {embedding}}}'


def _json_vector(row: Vectors) -> str:
    """Return a vector in the fewest digits that give the same float32."""
    return f"[{', '.join(map(str, row))}]"
