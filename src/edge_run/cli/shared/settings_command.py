"""Commands made of settings: defaults < configuration file < environment < flags, resolved by click, once."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from edge_run.base.errors import ConfigError
from edge_run.base.interrupt import Interrupt
from edge_run.cli.shared.config_file import config_path, read_config_file, refuse_unknown_variables
from edge_run.cli.shared.setting import Setting

HELP_NAMES = ["-h", "--help"]


class SettingsCommand(click.Command):
    """A command whose options may be `Setting`s; its help lists them in their groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`, with what the configuration file says about this command's settings as defaults."""
        options = self._options(ctx)
        words = list(_without_values(args, options))
        _refuse_unknown(words, options, ctx)
        if not set(HELP_NAMES) & set(words):
            from edge_run.cli.shared.options import SETTINGS  # here, so that help does without

            refuse_unknown_variables(SETTINGS)
            own = {parameter.name for parameter in self.params if isinstance(parameter, Setting)}
            values = self.read_configuration(ctx, SETTINGS) if own else {}
            ctx.default_map = {name: value for name, value in values.items() if name in own}
        return super().parse_args(ctx, args)

    def read_configuration(self, context: click.Context, settings: Iterable[Setting]) -> dict[str, Any]:
        """Return what the configuration file says, by name of the setting. Raises ConfigError."""
        return read_config_file(config_path(), settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def _options(self, context: click.Context) -> dict[str, click.Option]:
        """Return the options, each under all its names."""
        return {
            name: parameter
            for parameter in self.get_params(context)
            if isinstance(parameter, click.Option)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }


class CommandGroup(click.Group):
    """Commands under a common name, each of which does its own work; without a word, help.

    A command is imported when it is named, or when all are listed, so that none waits for what the others need.
    """

    def __init__(self, name: str, homes: Mapping[str, str], **attributes: Any) -> None:
        """Make a group of the commands that `homes` names, each with the module that has it.

        There it has the command's name, or the name that follows a colon.
        """
        super().__init__(name, **attributes)
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, which imports none."""
        return sorted(self.homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name; None where there is none."""
        home = self.homes.get(cmd_name)
        if home is None:
            return None
        module, _, attribute = home.partition(":")
        with Interrupt().hearing_signals():  # some modules lose what is raised while they are imported
            command: click.Command = getattr(importlib.import_module(module), attribute or cmd_name.replace("-", "_"))
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give help where no command is named."""
        if not args:
            ctx.obj.say_lines(self.get_help(ctx))
            ctx.exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)


def _without_values(args: Iterable[str], options: Mapping[str, click.Option]) -> Iterator[str]:
    """Yield the words of a command line that are no values of options, up to `--`."""
    rest = iter(args)
    for word in rest:
        if word == "--":
            return
        yield word
        option = options.get(word)
        if option is not None and not option.is_flag and not option.count:
            next(rest, None)


def _refuse_unknown(words: Iterable[str], options: Mapping[str, click.Option], context: click.Context) -> None:
    """Refuse `-ngl`, which click would read as `-n gl`: a short option takes a value that is glued to it."""
    for word in words:
        is_short = word[:1] == "-" and word[1:3].isalpha() and len(word) > 2
        if is_short and word not in options and set(word[1:]) != {"v"}:
            raise click.NoSuchOption(word, ctx=context)


def origin(context: click.Context, name: str) -> str:
    """Return where the value of the parameter `name` is from: `flag`, an environment variable, a file or `default`."""
    source = context.get_parameter_source(name)
    if source is click.core.ParameterSource.COMMANDLINE:
        return "flag"
    if source is click.core.ParameterSource.ENVIRONMENT:
        parameter = next(p for p in context.command.params if p.name == name)
        return str(parameter.envvar)
    return str(config_path()) if source is click.core.ParameterSource.DEFAULT_MAP else "default"
