"""Tests on a GPU: skipped, with the reason, where llama.cpp offers none; with NEED_GPU set that is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import in_child
from gpu_pairs import why_no_gpu

in_child.TIMEOUT_S = 880  # a driver compiles kernels at their first use, and one that the processor plays is slow


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if reason := why_no_gpu():
        (pytest.fail if os.environ.get("NEED_GPU") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models."""
    return tmp_path_factory.mktemp("models")
