"""What the public functions raise over a file that is not there: an error of ours that is Python's own, too."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

import edge_run
from edge_run.runtime.split.images import read_image_bytes


@pytest.mark.parametrize(
    "use",
    [
        edge_run.Model,
        edge_run.plan,
        edge_run.pack,
        edge_run.replay,
        edge_run.SplitModel,
        lambda path: edge_run.probe(model=path),
        lambda path: edge_run.inflate(path, path.with_name("large"), "1GiB"),
        lambda path: edge_run.trace(path, "Once", path.with_name("trace")),
        read_image_bytes,
    ],
)
def test_a_file_that_is_not_there_is_a_file_that_is_not_found(use: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing: ") as found:
        use(tmp_path / "missing")
    assert isinstance(found.value, edge_run.ModelFileMissing)
    assert (found.value.errno, found.value.exit_code) == (errno.ENOENT, 3)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_model_is_one_that_was_found(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model")
    with pytest.raises(edge_run.ModelFileError) as found:
        edge_run.Model(tmp_path / "text")
    assert not isinstance(found.value, OSError)
