"""`edge-run split bench`: bytes against accuracy, with the image codecs that have to be beaten beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.results import to_json
from edge_run.base.split import SplitBench
from edge_run.cli.answer import NOTICE
from edge_run.cli.commands import SettingsCommand
from edge_run.cli.options import some_settings
from edge_run.cli.tables import align
from edge_run.cli.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PATH = click.Path(path_type=Path)
_STYLES = {"code": ("#1f6fb2", "o", "bottleneck"), "jpeg": ("#d1873a", "s", "JPEG, then the whole network"),
           "webp": ("#6a9a3a", "^", "WebP, then the whole network")}  # fmt: skip


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["head"], metavar="HEAD", type=_PATH),
        click.Option(["--data"], type=_PATH, required=True, metavar="DIR", help="Images, in a folder for each class."),
        click.Option(["--most-images"], type=click.IntRange(1), metavar="N", help="Use N of them.  [default: all]"),
        click.Option(["--most-bytes"], type=click.IntRange(1), metavar="N", help="No code has more."),
        click.Option(["--plot"], type=_PATH, metavar="FILE.png", help="Draw a picture."),
        *some_settings("threads", "json"),
    ],
    short_help="Measure bytes against accuracy, with JPEG and WebP beside it.",
)
@click.pass_obj
def bench(terminal: Terminal, /, head: Path, data: Path, plot: Path | None, **given: Any) -> None:
    """Measure bytes and accuracy of each rate of the split that HEAD, a head.onnx, belongs to.

    Beside them are JPEG and WebP at many qualities, decoded and given to the uncut network.
    """
    from edge_run.runtime.split_bench import bench_split

    if plot is not None:
        from edge_run.cli.plot_file import check_plot

        plot = check_plot(plot)
    try:
        result = bench_split(
            head, data, given["most_images"], given["most_bytes"], given["threads"], show=terminal.show
        )
    finally:
        terminal.erase()
    if given["json"]:
        terminal.write_json(to_json(result))
    else:
        terminal.write(describe(result))
    if plot is not None:
        from edge_run.cli.plot_file import write_figure

        write_figure(plot, lambda figure: draw(result, figure))
        terminal.say(f"Drawn: {plot}", NOTICE)


def describe(result: SplitBench) -> str:
    """Return `result` as a table, a point of the curves on a line."""
    rows = [("way", "bytes", "largest", "right", "against uncut")]
    for one in result.points:
        lost = f"{100 * (one.accuracy - result.model_accuracy):+.2f}"
        rows.append((one.name, f"{one.mean_bytes:.1f}", str(one.largest_bytes), f"{one.accuracy:.2%}", lost))
    lines = [
        f"{result.head}: {result.images:,} images of {result.file_bytes:.0f} bytes; uncut {result.model_accuracy:.2%}",
        "",
        *align(rows),
    ]
    return "\n".join(lines) + "\n"


def draw(result: SplitBench, figure: Figure) -> None:
    """Draw the curves of bytes and accuracy."""
    axes = figure.subplots()
    for kind, (colour, marker, label) in _STYLES.items():
        points = [one for one in result.points if one.name.split()[0] == kind]
        x, y = [one.mean_bytes for one in points], [100 * one.accuracy for one in points]
        axes.plot(x, y, color=colour, marker=marker, label=label, linewidth=2)
    axes.axhline(100 * result.model_accuracy, color="#333333", linestyle="--", label="uncut, images as they are")
    axes.set_xlabel("bytes for an image")
    axes.set_ylabel("right, %")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    title = f"{Path(result.head).parent.name[:60]}: {result.images:,} images"
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
