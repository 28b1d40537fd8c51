"""`edge-run trace`: which experts a model's routers choose, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.base.strict_json import to_json
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings import MOST_PROMPT_BYTES, given_prompt, model_config, report, without_outranked
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import PROMPT_GIVEN, Terminal

DEFAULT_TOKENS = 128
_SETTINGS = (
    "prompt", "file", "memory", "ctx_size", "threads", "ubatch_size", "batch_size", "kv_type", "cache_type_k",
    "cache_type_v", "flash_attn", "readers", "expert_policy", "expert_prefetch", "packed", "repack", "backend",
    "cache_dir", "json", "verbose",
)  # fmt: skip


@click.command(
    cls=SettingsCommand,
    params=[MODEL, *some_settings(*_SETTINGS)],
    short_help="Record which experts a model's routers choose.",
)
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE.csv", help="Where to write it.")
@click.option(
    "-n", "--tokens", type=click.IntRange(1), default=DEFAULT_TOKENS, metavar="N",
    help=f"Tokens to decode.  [default: {DEFAULT_TOKENS}]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE.csv where it exists.")
@click.pass_context
def trace(context: click.Context, /, model_file: Path, output: Path, tokens: int, force: bool, **given: Any) -> None:
    """Let MODEL continue a prompt by its likeliest tokens, and write down which experts its routers choose.

    The prompt comes from -p, -f or standard input. `edge-run replay` says what caches would have made of the trace.
    """
    from edge_run.runtime.tools.tracing import trace as record

    terminal: Terminal = context.obj
    config = model_config(context, given, embeddings=False)
    report(context, terminal, config)
    prompt = given_prompt(without_outranked(context, given))
    if prompt is None and not terminal.can_ask:
        prompt = terminal.read_all(MOST_PROMPT_BYTES)
    if prompt is None:
        raise ConfigError("prompt: none; give one with -p, -f or standard input")
    recording = record(
        model_file,
        prompt,
        output,
        max_tokens=tokens,
        config=config,
        is_overwritten=force,
        opening=Interrupt().hearing_signals(),
        on_token=lambda number: terminal.show(f"{number} of {tokens} tokens"),
    )
    terminal.say_unread(PROMPT_GIVEN, [given["file"]] if given["file"] else ())
    if given["json"]:
        terminal.write_json(to_json(recording))
    else:
        terminal.say(
            f"Wrote {output}: {recording.prompt_tokens:,} tokens of the prompt and {recording.decoded_tokens:,} more, "
            f"through {recording.experts} experts in each of {recording.layers} layers",
            NOTICE,
        )
