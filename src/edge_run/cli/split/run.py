"""`edge-run split run`: the device side of a split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.split import FrameReport
from edge_run.base.strict_json import to_json
from edge_run.base.units import format_count
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["head"], metavar="HEAD", type=PATH),
        click.Option(["--server"], metavar="HOST[:PORT]", help="Without one, all is computed here."),
        click.Option(
            ["--image", "images"], multiple=True, type=PATH, metavar="FILE", help="An image; may be repeated."
        ),
        click.Option(["--dir", "folder"], type=PATH, metavar="DIR", help="All images in a folder."),
        click.Option(
            ["--deadline"], type=float, default=1.0, metavar="SECONDS", help="For each frame.  [default: 1.0]"
        ),
        click.Option(
            ["--mode"],
            default="auto",
            metavar="MODE",
            help="auto (the fastest), local, image, code, or 'code N' for rate N.  [default: auto]",
        ),
        click.Option(
            ["--most-bytes"],
            type=click.IntRange(1),
            metavar="N",
            help="No code has more: a lower rate is taken, or the frame is computed here.",
        ),
        click.Option(
            ["--filter", "use_filter"], is_flag=True, help="Send nothing for frames without anything of interest."
        ),
        *some_settings("threads", "json", "verbose"),
    ],
    short_help="Run images through a split, whichever way is fastest.",
)
@click.pass_context
def run(context: click.Context, /, head: Path, images: tuple[Path, ...], folder: Path | None, **given: Any) -> None:
    """Run images through the split that HEAD, a head.onnx, belongs to; each goes the way that is fastest then.

    When the server does not answer, the device computes the frame. With --json, each frame is a line. Needs the `split`
    extra.
    """
    from edge_run.cli.shared.settings import report
    from edge_run.runtime.split.images import image_paths
    from edge_run.runtime.split.model import SplitModel

    terminal: Terminal = context.obj
    report(context, terminal)
    if bool(images) == (folder is not None):
        raise ConfigError("split run: needs --image FILE or --dir DIR, one of the two")
    options = {"deadline_s": given["deadline"], "mode": given["mode"], "most_bytes": given["most_bytes"]}
    with SplitModel(
        head, given["server"], use_filter=given["use_filter"], threads=given["threads"], **options
    ) as model:
        if given["server"] and model.problem:
            terminal.say(f"No server: {model.problem}; computing here until there is one")
        reports = []
        for path in images if folder is None else image_paths(folder, "--dir"):
            frame = model.run(path)
            reports.append(frame.report)
            if given["json"]:
                terminal.write_json(to_json(frame.report))
            else:
                terminal.write(f"{path}: {_describe(frame.report)}\n")
        stats = model.stats
        if stats.refused:
            terminal.say(f"{format_count(stats.refused, 'frame')} refused, and computed here: {stats.refusal}")
    if len(reports) > 1 and not given["json"]:
        terminal.say(_summary(reports))


def _describe(report: FrameReport) -> str:
    answer = f"class {report.answer}, " if report.answer >= 0 else ""
    sent = f", {report.sent_bytes} bytes" if report.sent_bytes else ""
    lost = ", the server was lost" if report.lost_server else ""
    return f"{answer}{report.mode}{sent}, {report.seconds * 1e3:.1f} ms{lost}"


def _summary(reports: list[FrameReport]) -> str:
    modes = ", ".join(f"{count} {mode}" for mode, count in Counter(one.mode for one in reports).most_common())
    median = sorted(one.seconds for one in reports)[len(reports) // 2]
    return f"{len(reports)} frames: {modes}; median {median * 1e3:.1f} ms"
