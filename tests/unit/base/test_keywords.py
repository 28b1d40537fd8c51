"""Keywords for type checkers are the fields of the configs, with their types."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from edge_run.base.config import ModelConfig, ModelOptions
from edge_run.base.sampling_config import SamplingConfig, SamplingOptions


@pytest.mark.parametrize(("keywords", "config"), [(ModelOptions, ModelConfig), (SamplingOptions, SamplingConfig)])
def test_keywords_are_the_fields_of_the_config(keywords: type, config: type) -> None:
    hints = typing.get_type_hints(config)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    assert typing.get_type_hints(keywords) == fields
    assert not keywords.__required_keys__  # type: ignore[attr-defined]
