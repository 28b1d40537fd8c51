"""Keywords for type checkers are the fields of the configs, or the arguments of a class, with their types."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

import anyio
import pytest

import edge_run
from edge_run import (
    AsyncModel,
    AsyncSplitModel,
    ConfigError,
    Embeddings,
    MeshConfig,
    MeshOptions,
    Model,
    TextVectors,
    plan,
    probe,
    replay,
    trace,
)
from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.sampling_config import SamplingConfig, SamplingOptions
from edge_run.runtime.split.async_model import SplitOptions
from edge_run.runtime.split.model import SplitModel


@pytest.mark.parametrize(("keywords", "config"), [(ModelOptions, ModelConfig), (SamplingOptions, SamplingConfig)])
def test_keywords_are_the_fields_of_the_config(keywords: type, config: type) -> None:
    hints = typing.get_type_hints(config)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    assert typing.get_type_hints(keywords) == fields
    assert not keywords.__required_keys__  # type: ignore[attr-defined]


def test_keywords_of_a_split_model_for_tasks_are_those_of_a_split_model() -> None:
    hints, taken = typing.get_type_hints(SplitModel.__init__), inspect.signature(SplitModel).parameters.values()
    wanted = {one.name: hints[one.name] for one in taken if one.kind is one.KEYWORD_ONLY}
    assert typing.get_type_hints(SplitOptions) == wanted
    assert not SplitOptions.__required_keys__


def test_what_is_yes_or_no_is_given_by_name() -> None:
    """A bare True says nothing to who reads a call."""
    kinds = [getattr(edge_run, name) for name in edge_run.__all__]
    functions = [one for one in kinds if inspect.isfunction(one)]
    for kind in (one for one in kinds if inspect.isclass(one) and not dataclasses.is_dataclass(one)):
        functions += [
            one for name, one in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_" or name == "__init__"
        ]
    assert edge_run.probe in functions
    assert edge_run.Model.__init__ in functions
    taken = [(function, one) for function in functions for one in inspect.signature(function).parameters.values()]
    flags = [(function, one) for function, one in taken if one.default is True or one.default is False]
    assert len(flags) > 4
    assert not [(function, one.name) for function, one in flags if one.kind is not one.KEYWORD_ONLY]


@pytest.mark.parametrize(
    "of",
    [AsyncModel, AsyncSplitModel, Embeddings, MeshOptions, Model, SplitModel, TextVectors, plan, probe, replay, trace],
    ids=lambda of: of.__name__,
)
def test_a_program_can_ask_for_the_types_of_all_arguments(of: Any) -> None:
    """What makes commands or tools of functions asks for them; names that only checkers had raised NameError."""
    members = inspect.getmembers(of, inspect.isfunction) if isinstance(of, type) else [("", of)]
    assert all(isinstance(typing.get_type_hints(function), dict) for _, function in members)
    assert typing.get_type_hints(of) or not dataclasses.is_dataclass(of)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"memory": "1GiB"}}, r"config \{'memory': '1GiB'\}: must be a ModelConfig, or None"),
        ({"config": {}}, "must be a ModelConfig, or None"),
        ({"config": "4GiB"}, "config '4GiB': must be a ModelConfig, or None"),
        ({"mesh": True}, "mesh True: must be one that is open, the address of a broker"),
        ({"mesh": 1883}, "mesh 1883: must be one that is open"),
        ({"mesh": MeshConfig(Path("mesh"))}, "mesh MeshConfig.*: must be one that is open"),
    ],
)
def test_what_is_no_configuration_or_mesh_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    for kind in (Model, lambda path, **given: anyio.run(opened, path, given)):
        with pytest.raises(ConfigError, match=message):
            kind(Path("model.gguf"), **options)


async def opened(path: Path, options: dict[str, Any]) -> None:
    async with AsyncModel(path, **options):
        pass
