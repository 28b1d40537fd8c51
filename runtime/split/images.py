"""Images as a network takes them: single files, and folders of them. Needs Pillow."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import (
    ConfigError,
    ModelFileError,
    NotSupported,
    ProtocolError,
    TierReadError,
    not_opened,
    reason_of,
)
from edge_run.base.extras import SPLIT, need

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # Pillow reads some forty, most of them seldom looked at
MOST_PIXELS = 64 << 20
SMALL_PIXELS, PIXELS_OF_A_BYTE = 4 << 20, 256  # ten times what a JPEG of the lowest quality has
MOST_FILE_BYTES = 512 << 20  # of an image: 64 million pixels of eight bytes, as they are
KEPT_BYTES = 1 << 30  # of decoded images are kept at most, where there is room
_PIECE_BYTES = 1 << 20
_NOT_OPENED = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)  # sockets, and devices that nothing drives
MOST_SCANS = 500  # of a JPEG, whose encoders make ten: each goes through all blocks, and may take a few bytes
JPEG_START, SCAN = b"\xff\xd8\xff", b"\xff\xda"  # the latter by chance some 250 times in 16 MiB of other bytes


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What a network takes: channels (1 or 3), height, width."""

    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """All three."""
        return self.channels, self.height, self.width

    @classmethod
    def of(cls, shape: Sequence[int], name: str) -> ImageSize:
        """Return the size in an input's shape. Raises NotSupported where that is no image."""
        if len(shape) != 4 or shape[1] not in (1, 3):
            written = " x ".join(map(str, shape))
            raise NotSupported(f"{name}: its input is {written}; images need (batch, 1 or 3 channels, height, width)")
        return cls(*shape[1:])


def decode_image(data: bytes, size: ImageSize) -> NDArray[np.uint8]:
    """Return an encoded image as pixels (channels, height, width), scaled where it has another size.

    Raises ProtocolError where `data` is no JPEG, PNG, WebP or BMP, or has more than 64 million pixels, or so many for
    its bytes that it was made to take memory, or so many scans that it was made to take time. Which of these it is
    shows before any pixel is decoded.
    """
    image = need("PIL.Image", SPLIT)
    if data.startswith(JPEG_START) and (n_scans := data.count(SCAN)) > MOST_SCANS:
        raise ProtocolError(f"image: a JPEG of {n_scans:,} scans; at most {MOST_SCANS} are read")
    try:
        with image.open(io.BytesIO(data), formats=FORMATS) as opened:
            most = min(MOST_PIXELS, SMALL_PIXELS + PIXELS_OF_A_BYTE * len(data))
            if opened.width * opened.height > most:
                raise ProtocolError(
                    f"image: {opened.width} x {opened.height} in {len(data):,} bytes; at most {most:,} pixels are read"
                )
            picture = opened.convert("RGB" if size.channels == 3 else "L")
    except ProtocolError:
        raise
    except Exception as error:  # Pillow raises many kinds over broken files
        raise ProtocolError(f"image: {len(data)} bytes that are no image ({error})") from error
    if picture.size != (size.width, size.height):
        picture = picture.resize((size.width, size.height), image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return np.ascontiguousarray(pixels.reshape(size.height, size.width, size.channels).transpose(2, 0, 1))


def encode_image(pixels: NDArray[np.uint8], kind: str = "JPEG", quality: int = 90) -> bytes:
    """Return pixels (channels, height, width) as a file of this kind."""
    image = need("PIL.Image", SPLIT)
    rows = pixels.transpose(1, 2, 0)
    target = io.BytesIO()
    image.fromarray(rows if rows.shape[2] == 3 else rows[:, :, 0]).save(target, kind, quality=quality)
    return target.getvalue()


def read_image(path: Path, size: ImageSize) -> NDArray[np.uint8]:
    """Return the image file `path` as pixels. Raises as `read_bytes`, and ModelFileError where it is no image."""
    return pixels_of(path, read_image_bytes(path), size)


def pixels_of(path: Path, data: bytes, size: ImageSize) -> NDArray[np.uint8]:
    """Return what the file `path` holds, `data`, as pixels. Raises ModelFileError where it is no image."""
    try:
        return decode_image(data, size)
    except ProtocolError as error:
        raise ModelFileError(f"{path}: {error}") from error


def read_image_bytes(path: Path) -> bytes:
    """Return the bytes of the image file `path`. Raises as `read_bytes`."""
    return read_bytes(path, MOST_FILE_BYTES, "an image")


def read_bytes(path: Path, most_bytes: int, what: str) -> bytes:
    """Return what the file `path`, which is `what`, holds, of which no more than `most_bytes` are ever held.

    Raises ModelFileError where it cannot be read, is no regular file, or has more, and TierReadError by the drive.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise no_regular_file(path, what)
            size_bytes = status.st_size
            pieces, rest = [], most_bytes + 1 if size_bytes <= most_bytes else 0
            while rest and (piece := file.read(min(rest, max(size_bytes, _PIECE_BYTES)))):  # some say no size
                pieces.append(piece)
                rest -= len(piece)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise not_opened(error, f"{path}: cannot be read ({reason_of(error)}); check its permissions") from error
    except OSError as error:
        if error.errno in _NOT_OPENED:
            raise no_regular_file(path, what) from error
        why = f"{path}: cannot be read ({reason_of(error)}); check the drive"
        raise TierReadError(why, errno=error.errno) from error
    if not rest:
        found = f"{size_bytes:,}" if size_bytes > most_bytes else "more"
        raise ModelFileError(f"{path}: has {found} bytes; {what} has {most_bytes:,} at most: take it away")
    return b"".join(pieces)


def no_regular_file(path: Path, what: str) -> ModelFileError:
    """Return the error for what is at `path` and is no regular file, which `what` is."""
    return ModelFileError(f"{path}: is no regular file, {what} is one; copy it into one")


def _without_waiting(path: str, flags: int) -> int:
    """Open a file as `open` does; of a pipe, nobody is waited for who writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def image_paths(folder: Path, flag: str) -> list[Path]:
    """Return the images in `folder`, which `flag` named, and in the folders in it. Raises ConfigError without any."""
    if not folder.is_dir():
        raise ConfigError(f"{flag} {folder}: is no folder")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise ConfigError(f"{flag} {folder}: holds no images ({', '.join(SUFFIXES)})")
    return paths


class ImageFolder:
    """The images of a folder, and of the folders in it, as pixels.

    classes: its folders' names, in order; may be none.
    labels: the class of each image, by number; -1 for one that lies in no folder of a class.
    kept_bytes: decoded images are kept up to this much; may be set at any time.
    """

    def __init__(self, folder: Path, size: ImageSize, most: int | None = None) -> None:
        """Find the images, at most `most`, evenly from all. Raises ConfigError where there are none."""
        paths = image_paths(folder, "--data")
        classes = (path.relative_to(folder).parts[:-1] for path in paths)  # of all: their numbers are the network's
        self.classes = sorted({parts[0] for parts in classes if parts})
        if most is not None and most < len(paths):
            paths = [paths[index * len(paths) // most] for index in range(most)]
        self.paths, self.size = paths, size
        tops = [path.relative_to(folder).parts for path in paths]
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.labels = np.array([numbers.get(parts[0], -1) if len(parts) > 1 else -1 for parts in tops])
        self.kept_bytes = 0
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: Sequence[int] | NDArray[Any]) -> NDArray[np.uint8]:
        """Return these images (n, channels, height, width). Raises as `read_image`, naming the file."""
        return np.stack([self._image(int(index)) for index in indices])

    def _image(self, index: int) -> NDArray[np.uint8]:
        if index in self._kept:
            return self._kept[index]
        pixels = read_image(self.paths[index], self.size)
        if (len(self._kept) + 1) * pixels.nbytes <= self.kept_bytes:
            self._kept[index] = pixels
        return pixels
