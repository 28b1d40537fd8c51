"""`edge-run split train`: a learned bottleneck, from a network and a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edge_run.base.split import TrainReport
from edge_run.base.units import format_size
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.setting import PATH, NumberRange
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal
from edge_run.cli.split.numbers import numbers, whole_numbers

RATES, FEATURE_EPOCHS, ANSWER_EPOCHS, HALVINGS = "64,128,192,256", 0.5, 2.0, 3


def _path(name: str, help: str, **attributes: Any) -> click.Option:
    return click.Option([name], type=PATH, metavar="DIR", help=help, **attributes)


def _text(name: str, default: str, metavar: str, help: str) -> click.Option:
    return click.Option([name], default=default, metavar=metavar, help=f"{help}  [default: {default}]")


def _number(name: str, default: float, help: str, kind: Any = float) -> click.Option:
    return click.Option(
        [name], type=kind, default=default, metavar="N" if kind is int else "X", help=f"{help}  [default: {default}]"
    )


@click.command(
    cls=SettingsCommand,
    params=[
        MODEL,
        _path("--data", "Images, in a folder for each class or not.", required=True),
        click.Option(
            ["--cut"], required=True, metavar="NAME", help="The tensor to cut at: `split inspect` lists them."
        ),
        _path("--out", "A new or an empty folder for the files.  [default: split]", default=Path("split")),
        _text("--rates", RATES, "BYTES", "Mean bytes of a code, for each rate."),
        _text("--mean", "0", "X", "Of pixels from 0 to 1, one number or one for each channel."),
        _text("--std", "1", "X", "Their deviation: pixels become (x - mean) / std."),
        _number("--feature-epochs", FEATURE_EPOCHS, "Passes over the images that match features."),
        _number("--answer-epochs", ANSWER_EPOCHS, "Passes that match answers."),
        _number("--halvings", HALVINGS, "How often the code halves height and width.", int),
        click.Option(
            ["--most-images"], type=click.IntRange(2), metavar="N", help="Learn from N of the images.  [default: all]"
        ),
        click.Option(
            ["--empty"], multiple=True, metavar="CLASS", help="A folder without anything of interest: train a filter."
        ),
        _number("--most-missed", 0.01, "Share of interest that the filter may hold back.", NumberRange(0, 0.5)),
        click.Option(["--flips/--no-flips"], default=True, help="Mirror half of the images.  [default: yes]"),
        click.Option(
            ["-s", "--seed"], type=click.IntRange(0), default=0, metavar="N", help="Of what is drawn.  [default: 0]"
        ),
        *some_settings("memory", "threads", "json", "verbose"),
    ],
    short_help="Train a bottleneck: head.onnx, tail.onnx, code.json.",
)
@click.pass_context
def train(context: click.Context, /, model_file: Path, data: Path, cut: str, out: Path, **given: Any) -> None:
    """Train a bottleneck at a cut of the ONNX network MODEL, distilled from the network itself.

    Needs the `split` and `train` extras. Images are scaled to the network's size.
    """
    from edge_run.cli.shared.settings import report
    from edge_run.runtime.split.bottleneck import BottleneckShape
    from edge_run.runtime.split.train import TrainTask, train_split
    from edge_run.runtime.split.training import TrainConfig

    terminal: Terminal = context.obj
    report(context, terminal)
    config = TrainConfig(
        rates_bytes=whole_numbers("--rates", given["rates"]),
        mean=numbers("--mean", given["mean"]),
        deviation=numbers("--std", given["std"]),
        feature_epochs=given["feature_epochs"],
        answer_epochs=given["answer_epochs"],
        flips=given["flips"],
        seed=given["seed"],
        threads=given["threads"],
        memory_bytes=given["memory"],
        shape=BottleneckShape(halvings=given["halvings"]),
    )
    task = TrainTask(model_file, data, cut, out, given["empty"], given["most_missed"], given["most_images"])
    result = train_split(task, config, terminal.show)
    terminal.write_result(result, given["json"], describe)


def describe(result: TrainReport) -> str:
    """Return what was trained, a rate on a line."""
    rows: list[tuple[str, ...]] = [("rate", "bytes", "largest", "as uncut", "right", "uncut right")]
    for number, one in enumerate(result.rates):
        shares = (one.agreement, one.accuracy, one.model_accuracy)
        rows.append(
            (str(number), f"{one.mean_bytes:.0f}", str(one.largest_bytes), *(f"{share:.1%}" for share in shares))
        )
    lines = [
        f"{result.folder}: head of {format_size(result.head_bytes)}, {result.head_multiply_adds / 1e6:.1f} million "
        f"multiply-adds, {result.head_share:.1%} of the network's; learned from {result.images:,} images",
        "",
        *align(rows),
    ]
    return "\n".join(lines) + "\n"
