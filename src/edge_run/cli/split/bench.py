"""`edge-run split bench`: bytes against accuracy, and latency against bandwidth, with JPEG and WebP beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.files.texts import as_text
from edge_run.base.split import SplitBench, WayTime
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.plot_file import PLOT, PlotFile, draw_plot
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.tables import align
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = {"code": ("#1f6fb2", "o", "bottleneck"), "jpeg": ("#d1873a", "s", "JPEG, then the whole network"),
           "webp": ("#6a9a3a", "^", "WebP, then the whole network")}  # fmt: skip

_WAYS = {"local": ("#333333", "--"), "image": ("#d1873a", "-")}
SHOWN_MEGABITS = (0.1, 1.0, 10.0)
DRAWN_MEGABITS = tuple(0.05 * 1.25**step for step in range(38))


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["head"], metavar="HEAD", type=PATH),
        click.Option(["--data"], type=PATH, required=True, metavar="DIR", help="Images, in a folder for each class."),
        click.Option(["--most-images"], type=click.IntRange(1), metavar="N", help="Use N of them.  [default: all]"),
        click.Option(
            ["--most-bytes"], type=click.IntRange(1), metavar="N", help="Take a lower rate for codes with more."
        ),
        *PLOT,
        *some_settings("threads", "json"),
    ],
    short_help="Measure bytes against accuracy, and the time of a frame.",
)
@click.pass_obj
def bench(terminal: Terminal, /, head: Path, data: Path, plot: PlotFile | None, **given: Any) -> None:
    """Measure bytes and accuracy of each rate of the split that HEAD, a head.onnx, belongs to.

    Beside them are JPEG and WebP at many qualities, decoded and given to the uncut network, and what a frame takes: all
    here, as a code, or as the image that it is. Needs the `split` extra.
    """
    from edge_run.runtime.split.bench import bench_split

    result = bench_split(head, data, given["most_images"], given["most_bytes"], given["threads"], show=terminal.show)
    terminal.write_result(result, given["json"], describe)
    draw_plot(plot, lambda figure: draw(result, figure), terminal)


def describe(result: SplitBench) -> str:
    """Return `result` as a table, a point of the curves on a line."""
    rows = [("way", "bytes", "largest", "right", "against uncut")]
    for one in result.points:
        lost = f"{100 * (one.accuracy - result.model_accuracy):+.2f}"
        rows.append((one.name, f"{one.mean_bytes:.1f}", str(one.largest_bytes), f"{one.accuracy:.2%}", lost))
    times = [(way.name, _ms(way.device_s), _ms(way.server_s), *map(_ms, _latencies_s(way))) for way in result.ways]
    lines = [
        f"{result.head}: {result.images:,} images of {result.file_bytes:.0f} bytes; uncut {result.model_accuracy:.2%}",
        "",
        *align(rows),
        "",
        *align([("frame", "device", "server", *(f"at {megabits:g} Mbit/s" for megabits in SHOWN_MEGABITS)), *times]),
    ]
    return "\n".join(lines) + "\n"


def _latencies_s(way: WayTime, megabits: Sequence[float] = SHOWN_MEGABITS) -> list[float]:
    return [way.latency_s(1e6 / 8 * bandwidth) for bandwidth in megabits]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def draw(result: SplitBench, figure: Figure) -> None:
    """Draw the curves of bytes and accuracy, and those of bandwidth and latency."""
    accuracy, latency = figure.subplots(1, 2)
    _draw_accuracy(result, accuracy)
    _draw_latency(result, latency)
    title = f"{as_text(Path(result.head).parent.name)[:60]}: {result.images:,} images"
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)


def _draw_accuracy(result: SplitBench, axes: Axes) -> None:
    for kind, (colour, marker, label) in _STYLES.items():
        points = [one for one in result.points if one.name.split()[0] == kind]
        x, y = [one.mean_bytes for one in points], [100 * one.accuracy for one in points]
        axes.plot(x, y, color=colour, marker=marker, label=label, linewidth=2)
    axes.axhline(100 * result.model_accuracy, color="#333333", linestyle="--", label="uncut, images as they are")
    axes.set_xlabel("bytes for an image")
    axes.set_ylabel("right, %")
    axes.set_xlim(left=0)
    _finish(axes)


def _draw_latency(result: SplitBench, axes: Axes) -> None:
    codes = [way for way in result.ways if way.name.startswith("code")]
    for way in result.ways:
        colour, style = _WAYS.get(way.name, ("#1f6fb2", "-"))
        shade = 1.0 if way not in codes else 0.35 + 0.65 * (codes.index(way) + 1) / len(codes)
        y = [1e3 * seconds for seconds in _latencies_s(way, DRAWN_MEGABITS)]
        label = f"{way.name} ({way.sent_bytes:.0f} bytes)" if way.sent_bytes else way.name
        axes.plot(DRAWN_MEGABITS, y, color=colour, linestyle=style, alpha=shade, label=label, linewidth=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bandwidth, Mbit/s")
    axes.set_ylabel("a frame takes, ms, without the round trip")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
