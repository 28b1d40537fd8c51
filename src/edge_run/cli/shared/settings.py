"""From what flags, environment and configuration file said to what a run needs, checked as a whole."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from edge_run.base import strict_json
from edge_run.base.config import KV_AUTO, WIDEST_MICRO_BATCH, ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.files.folders import cache_folder
from edge_run.base.files.texts import read_text_file
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import MIB, format_size
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.printable import LogFormatter
from edge_run.cli.shared.settings_command import origin
from edge_run.cli.shared.terminal import Terminal

MOST_PROMPT_BYTES = 64 * MIB  # of which no context holds the tokens; the model says what fits
MOST_GRAMMAR_BYTES = 8 * MIB
_EXCLUDE_EACH_OTHER = (
    ("model_file", "model"),
    ("prompt", "file"),
    ("grammar", "grammar_file", "json_schema", "json_schema_file"),
)
_SECRETS = ("line", "broker")  # of `mesh join`: who has the line may come in, and a URL may have a password
_NEEDS = {  # what does nothing without another setting
    "mesh_any_numerics": "mesh",
    "mesh_activations": "mesh",
    "keep": "context_shift",
    "kv_keep_by": "kv_keep",
}
_RANK = {click.core.ParameterSource.COMMANDLINE: 0, click.core.ParameterSource.ENVIRONMENT: 1}
_Made = TypeVar("_Made")
_PLACES = ("packed", "prompt_cache", "kv_spill")  # of ModelConfig: a file or a folder, or a word
_MODEL_FIELDS = {s.name: s.field for s in SETTINGS if s.field in ModelConfig.__dataclass_fields__}
_SAMPLING_FIELDS = {s.name: s.field for s in SETTINGS if s.field in SamplingConfig.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run was asked to do. prompt None: none was given. is_chat None: nobody said. max_tokens None: no limit."""

    model: Path
    config: ModelConfig
    sampling: SamplingConfig
    prompt: str | None = None
    is_chat: bool | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    max_tokens: int | None = None
    is_json: bool = False
    shows_prompt: bool = False
    is_mesh: bool = False
    takes_any_numerics: bool = False


def resolve(context: click.Context, given: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run. Raises ConfigError for what cannot be."""
    values = without_outranked(context, given)
    return RunSettings(
        model=_model(values),
        config=model_config(context, values, embeddings=False),
        sampling=_sampling(context, values),
        prompt=given_prompt(values),
        is_chat=values["conversation"],
        system_prompt=values["system_prompt"],
        chat_template=values["chat_template"],
        max_tokens=_max_tokens(context, values),
        is_json=bool(values["json"]),
        shows_prompt=bool(values["display_prompt"]),
        is_mesh=bool(values["mesh"]),
        takes_any_numerics=bool(values["mesh_any_numerics"]),
    )


def _check_needs(context: click.Context, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag that does nothing without another setting. Other places than flags may say so."""
    for name, needed in _NEEDS.items():
        is_asked = values.get(name) is not None and values[name] is not False
        if is_asked and not values.get(needed) and origin(context, name) == "flag":
            flag, other = (f"--{one.replace('_', '-')}" for one in (name, needed))
            raise ConfigError(f"{flag}: does nothing without {other}; add that, or leave it out")


def model_config(context: click.Context, values: Mapping[str, Any], **defaults: Any) -> ModelConfig:
    """Return how to open a model; `defaults` stand in for what was not given. Raises ConfigError."""
    _check_needs(context, values)
    return _located(context, values, lambda given: _model_config(context, given, **defaults))


def _located(context: click.Context, values: Mapping[str, Any], make: Callable[[Mapping[str, Any]], _Made]) -> _Made:
    """Return what `make` makes of `values`.

    Its ConfigError says where the value is from that it is about, where that is no flag: one without which `make` says
    something else, or nothing.
    """
    try:
        return make(values)
    except ConfigError as error:
        for name in (name for name, value in values.items() if value is not None and _place(context, name)):
            try:
                make({**values, name: None})
            except ConfigError as other:
                if str(other) == str(error):
                    continue
            raise dataclasses.replace(error, message=f"{error.message} (from {_place(context, name)})") from error
        raise


def _place(context: click.Context, name: str) -> str:
    """Return which file or variable the value of a setting is from; empty for a flag, a default, and what is none."""
    place = origin(context, name)
    is_file = context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP
    return f"{place}: {name.replace('_', '-')}" if is_file else "" if place in ("flag", "default") else place


def _model_config(context: click.Context, values: Mapping[str, Any], **defaults: Any) -> ModelConfig:
    fields = {field: values.get(name) for name, field in _MODEL_FIELDS.items()}
    fields["kv_type"] = _kv_type(context, values)
    for name in _PLACES:
        if place := fields[name]:
            fields[name] = os.path.expanduser(place)
    fields["cache_folder"] = fields["cache_folder"] or cache_folder()
    fields = defaults | {field: value for field, value in fields.items() if value is not None}
    if values.get("batch_size") is not None:
        if values["batch_size"] < 1:
            raise ConfigError(f"batch size {values['batch_size']}: must be at least 1 token")
        asked = fields.get("micro_batch_tokens") or WIDEST_MICRO_BATCH
        fields["micro_batch_tokens"] = min(values["batch_size"], asked)
    return ModelConfig(**fields)


def check_settings(context: click.Context, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings, by name and converted, with which no model could be run."""
    values = without_outranked(context, {**{str(setting.name): None for setting in SETTINGS}, **given})
    model_config(context, values | {"cache_dir": Path()})  # which may be unknown, and is no mistake in a file
    _sampling(context, values)
    _max_tokens(context, values)


def report(context: click.Context, terminal: Terminal, *configs: ModelConfig | SamplingConfig) -> None:
    """With -v: log from here on, and say what every setting resolved to and where that was said."""
    verbosity = context.params["verbose"]
    if not verbosity:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if verbosity > 1 else logging.INFO)
    resolved = {field: value for config in configs for field, value in dataclasses.asdict(config).items()}
    for parameter in context.command.params:
        name, field = str(parameter.name), getattr(parameter, "field", "")
        value = resolved.get(field, context.params[name])
        if field or value not in (None, (), False):
            shown = (
                "automatic"
                if value is None
                else format_size(value)
                if name in ("memory", "gpu_memory", "size", "prompt_cache_size", "prompt_cache_daily")
                else value
            )
            shown = "a secret" if name in _SECRETS else shown
            terminal.say(f"{name.replace('_', '-')} = {shown} ({origin(context, name)})")


def without_outranked(context: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` less those settings for which one that excludes them was set nearer to the user.

    Raises ConfigError for two that were set equally near.
    """
    values = dict(given)
    for names in _EXCLUDE_EACH_OTHER:
        ranks = {name: _rank(context, name) for name in names if values.get(name) is not None}
        best = [name for name, rank in ranks.items() if rank == min(ranks.values())]
        if len(best) > 1:
            flags = " and ".join("MODEL" if name == "model_file" else f"--{name.replace('_', '-')}" for name in best)
            raise ConfigError(f"{flags}: exclude each other; give one")
        values.update(dict.fromkeys(ranks.keys() - set(best)))
    return values


def _rank(context: click.Context, name: str) -> int:
    source = context.get_parameter_source(name)
    return 2 if source is None else _RANK.get(source, 2)


def _model(values: Mapping[str, Any]) -> Path:
    path: Path | None = values["model_file"] or values["model"]
    if path is None:
        raise ConfigError("model: none given; name a GGUF file, as in edge-run model.gguf")
    return path


def _max_tokens(context: click.Context, values: Mapping[str, Any]) -> int | None:
    return _located(context, {"predict": values["predict"]}, lambda given: _most_tokens(given["predict"]))


def _most_tokens(n_predict: int | None) -> int | None:
    if n_predict is not None and n_predict < -1:
        raise ConfigError(f"tokens to predict {n_predict}: must be -1 (until the model ends) or more", found=n_predict)
    return None if n_predict == -1 else n_predict


def _kv_type(context: click.Context, values: Mapping[str, Any]) -> str:
    """Return the type, or both as K/V; a type for one of the two counts unless both were set nearer to the user.

    One type has one name: what is found out and decided under it holds in Python too.
    """
    both = values.get("kv_type")
    k, v = ModelConfig(kv_type=both).kv_types if both else ModelConfig().kv_types
    is_chosen = both == KV_AUTO
    for name in ("cache_type_k", "cache_type_v"):
        one = values.get(name)
        if one is not None and (not both or _rank(context, name) <= _rank(context, "kv_type")):
            k, v = (one, v) if name == "cache_type_k" else (k, one)
            is_chosen = False
    return KV_AUTO if is_chosen else k if k == v else f"{k}/{v}"


def _sampling(context: click.Context, values: Mapping[str, Any]) -> SamplingConfig:
    texts = dict[str, str | None]()
    for name in ("grammar", "json_schema"):
        file = values[f"{name}_file"]
        flag = f"--{name.replace('_', '-')}-file {file}"
        texts[name] = values[name] if file is None else read_text_file(file, flag, MOST_GRAMMAR_BYTES)

    def make(given: Mapping[str, Any]) -> SamplingConfig:
        fields = {field: given[name] for name, field in _SAMPLING_FIELDS.items() if given[name] is not None}
        fields["seed"] = None if given["seed"] == -1 else given["seed"]
        return SamplingConfig(**fields, stop=given["stop"] or (), **{name: given[name] for name in texts})

    return _located(context, {**values, **texts}, make)


def given_sampling(context: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was said of sampling, and nothing else, in the words of OpenAI's API and llama-server's."""
    said = _sampling(context, values)
    found = {field: getattr(said, field) for name, field in _SAMPLING_FIELDS.items() if values[name] is not None}
    for name in ("stop", "seed", "grammar"):
        if (value := getattr(said, name)) not in (None, ()):
            found[name] = list(value) if isinstance(value, tuple) else value
    if said.json_schema is not None:
        try:
            schema = strict_json.parse(said.json_schema_text)
        except ValueError as error:
            raise ConfigError(f"--json-schema: is not JSON as it should be: {error}") from error
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return found


def given_prompt(values: Mapping[str, Any]) -> str | None:
    """Return the prompt, or the text of the prompt file; None where neither was given. Raises ConfigError."""
    prompt: str | None = values["prompt"]
    if (path := values["file"]) is not None:
        prompt = read_text_file(path, f"--file {path}", MOST_PROMPT_BYTES).removesuffix("\n")
    return prompt
