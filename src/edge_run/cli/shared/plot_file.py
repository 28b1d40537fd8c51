"""PNG files that commands draw: checked before the work begins, written as a whole or not at all."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_run.base.errors import ConfigError, NotSupported, TierReadError
from edge_run.base.files.whole import file_to_write, whole_file, writing
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".png"
INCHES, DOTS_PER_INCH = (9.0, 4.8), 150


@dataclass(frozen=True, slots=True)
class PlotFile:
    """Where a picture will be. is_replacing: one that is there goes."""

    path: Path
    is_replacing: bool


def check_plot(path: Path, *, is_replacing: bool = False) -> PlotFile:
    """Return where the picture will be; refuse what cannot be drawn or written before anything is measured.

    Raises ConfigError, TierReadError, or NotSupported without matplotlib.
    """
    if path.suffix.lower() != SUFFIX:
        raise ConfigError(f"--plot {path}: must be a PNG file; name it {path.name or 'picture'}{SUFFIX}")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotSupported("--plot: needs matplotlib, which is not installed; pip install 'edge-run[plot]'")
    target = file_to_write(path, f"--plot {path}", is_replacing)
    if target.exists() and not os.access(target, os.W_OK):
        raise TierReadError(f"--plot {path}: cannot be written (Permission denied); choose another name")
    with writing(f"--plot {path}"):
        tempfile.TemporaryFile(dir=target.parent).close()
    return PlotFile(target, is_replacing)


def _checked(context: click.Context, parameter: click.Parameter, path: Path | None) -> PlotFile | None:
    is_replacing: bool = context.params["force"]
    if path is not None:
        return check_plot(path, is_replacing=is_replacing)
    if is_replacing:
        raise ConfigError("--force: replaces a picture; name it with --plot")
    return None


PLOT = (
    click.Option(["--plot"], type=PATH, callback=_checked, metavar="FILE.png", help="Draw a picture."),
    click.Option(["--force"], is_flag=True, is_eager=True, help="Replace FILE.png where it exists."),  # known first
)


def draw_plot(plot: PlotFile | None, draw: Callable[[Figure], None], terminal: Terminal) -> None:
    """Write the picture that `draw` makes and say where it is, where one was asked for."""
    if plot is not None:
        write_figure(plot, draw)
        terminal.say(f"Drawn: {plot.path}", NOTICE)


def write_figure(plot: PlotFile, draw: Callable[[Figure], None]) -> None:
    """Write what `draw` makes of an empty figure to where `check_plot` said; all of it or nothing."""
    place = whole_file(plot.path, is_replacing=plot.is_replacing)
    with writing(f"--plot {plot.path}"), place as draft, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name with characters that the font lacks
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would speak of its font cache
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(draft, format="png")
