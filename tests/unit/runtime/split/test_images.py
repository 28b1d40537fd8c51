"""Folders of images, whose names are classes."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("PIL")

from PIL import Image

from edge_run.base.errors import ModelFileError, ProtocolError, TierReadError
from edge_run.partition.entropy_coding import FrequencyTable
from edge_run.partition.latent_codec import Rate
from edge_run.runtime.split.bundle import FORMAT, StoredCode, StoredRate, read_bundle, write_code
from edge_run.runtime.split.images import ImageFolder, ImageSize, decode_image, read_bytes, read_image


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
    def fail(path: Path, *_: str) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ModelFileError, match="check its permissions"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(TierReadError, match=r"1\.jpg: cannot be read \(Input/output error\); check the drive"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no such device")
def test_no_more_is_read_of_what_has_no_end(tmp_path: Path) -> None:
    """A bundle of a stranger may have a link for a file."""
    (tmp_path / "code.json").symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=r"code\.json: has more bytes; one of ours has 16,777,216 at most"):
        read_bundle(tmp_path)
    pipe, writer = os.pipe()
    os.write(writer, b"some bytes")
    os.close(writer)
    try:
        assert read_bytes(Path(f"/dev/fd/{pipe}"), 10, "a text") == b"some bytes"
    finally:
        os.close(pipe)
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty", 10, "a text") == b""


def test_images_have_one_channel_or_three(tmp_path: Path) -> None:
    rate = Rate((1.0,), (FrequencyTable(0, (1, 1)),))
    sizes = (StoredRate(100, rate, 1, 1, 1, 1, 1, 1),)
    for channels in (1, 2, 3, 4):
        write_code(tmp_path, StoredCode(FORMAT, "", "", "", "cut", (channels, 8, 8), (1, 2, 2), ("y",), sizes, ()))
        if channels in (1, 3):
            assert read_bundle(tmp_path).size == ImageSize(channels, 8, 8)
        else:
            with pytest.raises(ModelFileError, match=f"images of {channels} channels, there are those of 1 and of 3"):
                read_bundle(tmp_path)
