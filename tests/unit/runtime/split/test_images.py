"""Folders of images, whose names are classes."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("PIL")

from PIL import Image

from edge_run.base.errors import ModelFileError, ProtocolError, TierReadError
from edge_run.partition.entropy_coding import FrequencyTable
from edge_run.partition.latent_codec import Rate
from edge_run.runtime.split import images as split_images
from edge_run.runtime.split.bundle import CODE_FILE, FORMAT, StoredCode, StoredRate, code_json, read_bundle
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
    def fail(path: str, flags: int) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(ModelFileError, match="check its permissions"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))
    monkeypatch.setattr(split_images, "_without_waiting", fail)
    with pytest.raises(TierReadError, match=r"1\.jpg: cannot be read \(Input/output error\); check the drive"):
        read_image(tmp_path / "1.jpg", ImageSize(3, 8, 8))


def test_what_is_no_file_is_refused_and_nobody_is_waited_for(tmp_path: Path) -> None:
    """A bundle of a stranger may have a pipe for a file, or a link to a device."""
    os.mkfifo(tmp_path / "head.onnx")
    (tmp_path / "code.json").symlink_to("/dev/zero")
    with pytest.raises(ModelFileError, match=r"code\.json: is no regular file, one of ours is one; copy it"):
        read_bundle(tmp_path)
    with pytest.raises(ModelFileError, match=r"head\.onnx: is no regular file, an image is one; copy it"):
        read_image(tmp_path / "head.onnx", ImageSize(3, 8, 8))
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    with pytest.raises(ModelFileError, match="socket: is no regular file, a text is one; copy it"):
        read_bytes(tmp_path / "socket", 10, "a text")
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty", 10, "a text") == b""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no file that says no size here")
def test_no_more_is_read_of_a_file_that_says_no_size() -> None:
    path = Path("/proc/self/stat")
    assert read_bytes(path, 1 << 16, "a text")
    with pytest.raises(ModelFileError, match="has more bytes; a text has 10 at most"):
        read_bytes(path, 10, "a text")


def test_images_have_one_channel_or_three(tmp_path: Path) -> None:
    rate = Rate((1.0,), (FrequencyTable(0, (1, 1)),))
    sizes = (StoredRate(100, rate, 1, 1, 1, 1, 1, 1),)
    for channels in (1, 2, 3, 4):
        code = StoredCode(FORMAT, "", "", "", "cut", (channels, 8, 8), (1, 2, 2), ("y",), sizes, ())
        (tmp_path / CODE_FILE).write_bytes(code_json(code))
        if channels in (1, 3):
            assert read_bundle(tmp_path).size == ImageSize(channels, 8, 8)
        else:
            with pytest.raises(ModelFileError, match=f"images of {channels} channels, there are those of 1 and of 3"):
                read_bundle(tmp_path)
