"""Folders of images, whose names are classes."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from PIL import Image

from edge_run.base.errors import ModelFileError, ProtocolError, TierReadError
from edge_run.runtime.split.images import ImageFolder, ImageSize, decode_image, read_image


def test_classes_keep_their_numbers_where_only_some_images_are_taken(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").touch()
    some = ImageFolder(tmp_path, ImageSize(3, 8, 8), most=2)
    assert some.classes == ["ant", "bee", "cat", "dog"]
    assert [path.parent.name for path in some.paths] == [some.classes[label] for label in some.labels] == ["ant", "cat"]


def test_a_jpeg_made_to_take_time_is_refused_before_it_is_decoded() -> None:
    """Each scan goes through the whole image, and takes a few bytes."""
    target = io.BytesIO()
    Image.new("L", (64, 64)).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    assert decode_image(data, ImageSize(1, 64, 64)).shape == (1, 64, 64)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ProtocolError, match="scans; at most 500 are read"):
        decode_image(data[:-2] + 500 * scan + data[-2:], ImageSize(1, 64, 64))


def test_a_drive_that_fails_is_no_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ModelFileError, match="check its permissions"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(TierReadError, match=r"1\.jpg: cannot be read \(Input/output error\); check the drive"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))
