"""PNG files that commands draw: checked before the work begins, written as a whole or not at all."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
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


def check_plot(path: Path) -> Path:
    """Return where the picture will be; refuse what cannot be drawn or written before anything is measured.

    Raises ConfigError, TierReadError, or NotSupported without matplotlib.
    """
    if path.suffix.lower() != SUFFIX:
        raise ConfigError(f"--plot {path}: must be a PNG file; name it {path.name or 'picture'}{SUFFIX}")
    if importlib.util.find_spec("matplotlib") is None:
        raise NotSupported("--plot: needs matplotlib, which is not installed; pip install 'edge-run[plot]'")
    target = file_to_write(path, f"--plot {path}")
    if target.exists() and not os.access(target, os.W_OK):
        raise TierReadError(f"--plot {path}: cannot be written (Permission denied); choose another name")
    with writing(f"--plot {path}"):
        tempfile.TemporaryFile(dir=target.parent).close()
    return target


PLOT = click.Option(  # its value was checked
    ["--plot"],
    type=PATH,
    callback=lambda context, parameter, path: None if path is None else check_plot(path),
    metavar="FILE.png",
    help="Draw a picture.",
)


def draw_plot(path: Path | None, draw: Callable[[Figure], None], terminal: Terminal) -> None:
    """Write the picture that `draw` makes and say where it is, where a `path` was given."""
    if path is not None:
        write_figure(path, draw)
        terminal.say(f"Drawn: {path}", NOTICE)


def write_figure(path: Path, draw: Callable[[Figure], None]) -> None:
    """Write what `draw` makes of an empty figure to `path`, which `check_plot` returned; all of it or nothing."""
    with writing(f"--plot {path}"), whole_file(path) as draft, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name with characters that the font lacks
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would speak of its font cache
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(draft, format="png")
