"""`edge-run doctor`: what is wrong with this installation, this device or a model, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.files.folders import cache_folder
from edge_run.cli.reports.findings import EXIT_CODES, end_with_report
from edge_run.cli.shared.config_file import config_path
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.setting import PATH, Setting
from edge_run.cli.shared.settings import check_settings
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.devices.host.findings import OK, PROBLEM, Finding, Report

_MISTAKE = "edge_run.mistake"
_MODEL = click.Argument(["model_file"], metavar="[MODEL]", required=False, type=PATH)


class TolerantCommand(SettingsCommand):
    """A command that runs without what is broken in the configuration file, and can say so."""

    def read_configuration(self, context: click.Context, settings: Iterable[Setting]) -> dict[str, Any]:
        """Return what can be used of the configuration file; the first mistake is kept for `check_configuration`."""
        known = {str(setting.name): setting for setting in settings}
        try:
            found = super().read_configuration(context, known.values())
        except ConfigError as error:
            context.meta[_MISTAKE] = str(error)
            return {}
        usable, mistakes = dict[str, Any](), list[str]()
        for name, value in found.items():
            try:
                usable[name] = known[name].process_value(context, value)
            except click.UsageError as error:
                mistakes.append(f"{known[name].key} = {value!r}: {error.message.rstrip('.')}")
        try:
            check_settings(context, usable)
        except ConfigError as error:
            mistakes.append(str(error))
        if mistakes:
            context.meta[_MISTAKE] = f"{config_path()}: {mistakes[0]}"
        return {name: found[name] for name in usable}


@click.command(
    cls=TolerantCommand,
    params=[_MODEL, *some_settings("memory", "also", "cache_dir", "json")],
    short_help="Say what is wrong here, and what to do.",
    epilog=EXIT_CODES,
)
@click.pass_context
def doctor(context: click.Context, /, **given: Any) -> None:
    """Examine this installation, this device and, where one is named, the GGUF file MODEL.

    Each finding is one line: what is fine, what is slower or less than it could be (a note), what keeps models from
    running as they should (a problem); then what to do about it.
    """
    from edge_run.runtime.doctor.doctor import examine

    findings = [check_configuration(context)]
    folder = None
    try:
        folder = given["cache_dir"] or cache_folder()
    except ConfigError as error:
        findings.append(Finding("cache folder", PROBLEM, str(error)))
    report = examine(given["model_file"], folder, given["memory"], also=given["also"])
    end_with_report(context, Report((*findings, *report.findings)), given["json"])


def check_configuration(context: click.Context) -> Finding:
    """Whether the configuration file can be used."""
    path = config_path()
    if _MISTAKE in context.meta:
        return Finding("configuration", PROBLEM, context.meta[_MISTAKE])
    if path is None:
        return Finding("configuration", OK, "none, as no home folder is known")
    return Finding("configuration", OK, f"{path}{'' if path.exists() else ': none, which is fine'}")
