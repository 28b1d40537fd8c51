"""The tree of errors: what a caller catches, and what the shell sees."""

import dataclasses
import errno
import inspect
import pickle
import re

import pytest

import edge_run
from edge_run.base import errors
from edge_run.base.errors import (
    BudgetError,
    ConfigError,
    EdgeRunError,
    ModelFileError,
    ModelFileMissing,
    TierReadError,
    not_opened,
    reason_of,
)

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EdgeRunError)]


def test_exit_codes_are_those_of_the_docstring_and_no_two_alike() -> None:
    """Scripts tell failures apart by them. A kind without one of its own has that of the kind above it."""
    drawn = dict(re.findall(r"(\w+)(?:\(\w+\))? +(\d+) ", errors.__doc__ or ""))
    assert drawn == {kind.__name__: str(kind.exit_code) for kind in KINDS}
    own = [kind.exit_code for kind in KINDS if "exit_code" in vars(kind)]
    assert len(set(own)) == len(own) == len(KINDS) - 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_can_be_imported_from_the_package_and_carries_its_figures(kind: type[EdgeRunError]) -> None:
    assert getattr(edge_run, kind.__name__) is kind
    names = [field.name for field in dataclasses.fields(kind) if field.name != "message"]
    figures = {name: "b" if name == "node" else 3 for name in names}
    error = pickle.loads(pickle.dumps(kind("what was tried", **figures)))
    assert str(error) == ("node b: what was tried" if "node" in names else "what was tried")
    assert error.message == "what was tried"
    assert {name: getattr(error, name) for name in names} == figures
    assert not any(getattr(kind("what was tried"), name) for name in names), "what it does not have"
    with pytest.raises(TypeError):
        kind("what was tried", of_no_such_name=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_can_be_made_anew_without_its_initializer(kind: type[EdgeRunError]) -> None:
    """As distributed does (through tblib) with what a Dask worker raised; it also takes over how pickle does it."""
    assert type(kind.__new__(kind, "what was tried")) is kind


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ConfigError, ValueError),
        (BudgetError, MemoryError),
        (TierReadError, OSError),
        (ModelFileMissing, FileNotFoundError),
        (ModelFileMissing, ModelFileError),
    ],
)
def test_each_is_also_of_the_kind_that_python_has_for_it(kind: type[EdgeRunError], base: type[Exception]) -> None:
    with pytest.raises(base):
        raise kind("what was tried")


def test_a_file_that_is_missing_is_told_from_one_that_cannot_be_opened() -> None:
    missing = pickle.loads(pickle.dumps(not_opened(FileNotFoundError(errno.ENOENT, "No such file"), "a: cannot open")))
    assert (type(missing), missing.exit_code, str(missing)) == (ModelFileMissing, 3, "a: cannot open")
    assert missing.errno == errno.ENOENT
    for error in (PermissionError(errno.EACCES, "Permission denied"), ValueError("embedded null byte")):
        assert type(not_opened(error, "a: cannot open")) is ModelFileError


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (OSError(errno.ENOENT, "No such file or directory", "model.gguf"), "No such file or directory"),
        (OSError("timed out"), "timed out"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("no number"), "no number"),
    ],
)
def test_why_something_failed(error: Exception, wanted: str) -> None:
    assert reason_of(error) == wanted
