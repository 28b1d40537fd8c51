"""Keywords for type checkers are the fields of the configs, or the arguments of a class, with their types."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

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
