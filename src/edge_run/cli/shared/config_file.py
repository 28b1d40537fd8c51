"""The configuration file, `~/.config/edge-run/config.toml`: settings of a run under the long names of its flags.

memory = "4GiB"
ctx-size = 8192
stop = ["User:", "###"]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from edge_run.base.errors import ConfigError, reason_of
from edge_run.base.files.folders import config_folder
from edge_run.cli.shared.setting import (
    BROKER_VARIABLE,
    ENVIRONMENT_PREFIX,
    KEY_VARIABLE,
    TEST_MODELS_VARIABLE,
    Setting,
)


def config_path() -> Path | None:
    """Return where the configuration file is looked for; None where no home is known, and there is none."""
    folder = config_folder()
    return folder and folder / "config.toml"


def refuse_unknown_variables(settings: Iterable[Setting]) -> None:
    """Raise ConfigError for a variable of the environment that looks like a setting, and is none of `settings`.

    What is misspelled would be ignored: a run without the budget that was meant for it.
    """
    others = (one.removeprefix(ENVIRONMENT_PREFIX) for one in (KEY_VARIABLE, BROKER_VARIABLE))
    known = [*(str(setting.name).upper() for setting in settings), *others]
    ours = (name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name != TEST_MODELS_VARIABLE)
    unknown = sorted(name for name in ours if name.removeprefix(ENVIRONMENT_PREFIX) not in known)
    if unknown:
        import difflib  # which takes long to load

        word = unknown[0].removeprefix(ENVIRONMENT_PREFIX).upper()
        near = difflib.get_close_matches(word, known, 1) or [name for name in known if word and name.startswith(word)]
        advice = (
            f"did you mean {ENVIRONMENT_PREFIX}{near[0]}? Correct it"
            if near
            else "edge-run run --help lists them; correct it"
        )
        raise ConfigError(f"environment: {unknown[0]}: no such setting; {advice}, or unset it")


def read_config_file(path: Path | None, settings: Iterable[Setting]) -> dict[str, Any]:
    """Return what the file at `path` sets, by name of the setting (`ctx_size`); nothing without a path, or a file.

    Raises ConfigError for a file that cannot be read, is no TOML, or says what none of `settings` understands.
    """
    if path is None:
        return {}
    try:
        content = _parse_toml(path.read_text(encoding="utf-8-sig"))  # some editors begin with a mark
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({reason_of(error)}); repair it or remove it") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or nested too deep
        raise ConfigError(f"{path}: not a TOML file: {error}; repair it or remove it") from error
    known = {setting.key: setting for setting in settings}
    values = {}
    for key, value in content.items():
        setting = known.get(key.replace("_", "-"))
        if setting is None:
            raise ConfigError(f"{path}: {key!r}: unknown; {_advice_on(key, value, known)}")
        if not setting.is_right(value):
            raise ConfigError(f"{path}: {key} = {value!r}: must be {setting.kind}")
        values[str(setting.name)] = value
    return values


def _advice_on(key: str, value: object, known: Collection[str]) -> str:
    """Return what to do about a key of the file that no setting has."""
    if isinstance(value, dict):
        return "settings stand at the top of the file, in no table; remove the brackets"
    import difflib  # which takes long to load

    if near := difflib.get_close_matches(key.replace("_", "-").lower(), known, 1):
        return f"did you mean {near[0]}? Correct it or remove it"
    return f"known are {', '.join(sorted(known))}"


def _parse_toml(text: str) -> dict[str, Any]:
    """Return what a TOML text says. Raises ValueError. Most devices have no such file, and load no parser."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
