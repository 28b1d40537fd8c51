"""Keywords for type checkers are the fields of the configs, or the arguments of a class, with their types."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

import edge_run
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
