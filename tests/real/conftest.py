"""Tests on real, trained models: skipped, with the reason, where none are; a file of another hash is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

import in_child
from real_models import Missing, RealModel, find

in_child.TIMEOUT_S = 280  # a gigabyte is read for each token, on a disk of any speed


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Path:
    """The file of the model that the test is run with."""
    return found(request.param)


def found(model: RealModel) -> Path:
    """Return the file of `model`; skips where it is not there."""
    try:
        return find(model)
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture
def files(request: pytest.FixtureRequest) -> list[Path]:
    """The files of the models that the test is run with."""
    return [found(model) for model in request.param]
