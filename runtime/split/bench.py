"""`edge-run split bench`: bytes against accuracy of a trained split, with JPEG and WebP beside it; and time.

After sc2-benchmark (Matsubara et al., 2023): the bytes are those of the serialised object, one image at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.split import CurvePoint, SplitBench, WayTime
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import available_bytes
from edge_run.partition.latent_codec import MOST_PAYLOAD_BYTES, CodeTooLong
from edge_run.runtime.split.bundle import HEAD_FILE, MODEL_FILE, TAIL_FILE, Bundle, read_bundle
from edge_run.runtime.split.images import (
    KEPT_BYTES,
    SCAN,
    ImageFolder,
    ImageSize,
    decode_image,
    encode_image,
    read_image_bytes,
)
from edge_run.runtime.split.onnx_session import median_s, run_session

JPEG_QUALITIES = (1, 5, 10, 20, 30, 45, 65, 85)
WEBP_QUALITIES = (0, 5, 15, 30, 50, 70, 90)
AT_ONCE = 8  # images in a pass: no more is ever held of images and tensors, however many there are
KEPT_SHARE = 4  # decoded images are kept in at most a quarter of what is free
_END = b"\xff\xd9"


def bench_split(
    head: Path,
    data: Path,
    most_images: int | None = None,
    most_bytes: int | None = None,
    threads: int | None = None,
    baselines: bool = True,
    show: Callable[[str], None] = lambda text: None,
) -> SplitBench:
    """Return bytes and accuracy of every rate of the split `head`, and of image codecs before its uncut network.

    data: images in a folder for each class, the folders in the order of the network's classes. most_bytes: an image
    whose code would have more takes a lower rate, as far as there is one. baselines: measure JPEG and WebP too.

    Raises ConfigError, ModelFileError, NotSupported, TierReadError.
    """
    bundle = read_bundle(head)
    images = ImageFolder(data, bundle.size, most_images)
    images.kept_bytes = min(KEPT_BYTES, max(available_bytes(promised_bytes=Ledger().promised_bytes), 0) // KEPT_SHARE)
    if (images.labels < 0).any():
        raise ConfigError(f"--data {data}: has images outside of folders; accuracy needs a folder for each class")
    bench = _Bench(bundle, images, most_bytes, threads, show)
    uncut, classes = bench.uncut()
    if classes != len(images.classes):
        raise NotSupported(
            f"{data}: has {len(images.classes)} folders, the network answers {classes} classes; give images of its own "
            "classes, a folder for each"
        )
    codes = bench.codes()
    points = (*codes, *(bench.baselines() if baselines else ()))
    worst = bench.worst_overhead_bytes
    ways = tuple(bench.ways([point.mean_bytes for point in codes]))
    return SplitBench(str(head), str(data), len(images), uncut, bench.original_bytes(), worst, points, ways)


@dataclass(slots=True)
class _Sums:
    """What a way to the answer came to, over the images so far."""

    name: str
    images: int = 0
    coded_bytes: int = 0
    largest_bytes: int = 0
    right: int = 0

    def add(self, sizes: Sequence[int], right: int) -> None:
        """Take in some images: the bytes of each, and how many were answered right."""
        self.images += len(sizes)
        self.coded_bytes += sum(sizes)
        self.largest_bytes = max(self.largest_bytes, *sizes)
        self.right += right

    @property
    def point(self) -> CurvePoint:
        return CurvePoint(self.name, self.coded_bytes / self.images, self.largest_bytes, self.right / self.images)


class _Bench:
    """Passes over the images, each with another way to the answer.

    worst_overhead_bytes: see SplitBench.
    """

    def __init__(
        self,
        bundle: Bundle,
        images: ImageFolder,
        most_bytes: int | None,
        threads: int | None,
        show: Callable[[str], None],
    ) -> None:
        self._bundle, self._images, self._show = bundle, images, show
        self._most_bytes = most_bytes or 1 << 30
        self._head, self._tail, self._model = (
            bundle.open(name, threads) for name in (HEAD_FILE, TAIL_FILE, MODEL_FILE)
        )
        self.worst_overhead_bytes = -float("inf")

    def uncut(self) -> tuple[float, int]:
        """Return the accuracy of the uncut network, and how many classes it answers."""
        self._show("the uncut network")
        right, classes = 0, 0
        for chosen, pixels in self._batches():
            (answers,) = run_session(self._model, pixels)[:1]
            classes = answers.shape[1] if answers.ndim == 2 else 0
            right += self._right(answers, chosen) if classes else 0
        return right / len(self._images), classes

    def codes(self) -> list[CurvePoint]:
        """Return a point for each rate."""
        codec = self._bundle.codec
        sums = [_Sums(f"code {rate}") for rate in range(len(codec.rates))]
        for chosen, pixels in self._batches():
            self._show(f"codes: image {chosen[0] + 1:,} of {len(self._images):,}")
            latents = run_session(self._head, pixels)[0]
            for rate, one in enumerate(sums):
                sizes, decoded = zip(*(self._coded(latent, rate) for latent in latents), strict=True)
                one.add(sizes, self._right(run_session(self._tail, np.stack(decoded))[0], chosen))
        return [one.point for one in sums]

    def baselines(self) -> Iterator[CurvePoint]:
        """Yield points of JPEG and WebP, without what is the same in all files: containers, headers, tables."""
        for kind, qualities in (("JPEG", JPEG_QUALITIES), ("WebP", WEBP_QUALITIES)):
            for quality in qualities:
                self._show(f"{kind}, quality {quality}")
                sums = _Sums(f"{kind.lower()} {quality}")
                for chosen, pixels in self._batches():
                    files = [encode_image(one, kind, quality) for one in pixels]
                    answers = run_session(self._model, _decoded(files, self._bundle.size))[0]
                    sums.add([coded_bytes(one) for one in files], self._right(answers, chosen))
                yield sums.point

    def ways(self, code_bytes: Sequence[float]) -> Iterator[WayTime]:
        """Yield what a frame takes each way, one at a time; code_bytes: mean bytes of a code, by rate."""
        self._show("the time of a frame")
        codec, file = self._bundle.codec, read_image_bytes(self._images.paths[0])
        pixels = decode_image(file, self._bundle.size)[None]
        yield WayTime("local", median_s(lambda: run_session(self._model, pixels)), 0.0, 0.0)
        whole_s = median_s(lambda: run_session(self._model, decode_image(file, self._bundle.size)[None]))
        yield WayTime("image", 0.0, whole_s, self.original_bytes())
        shape = run_session(self._head, pixels)[0].shape

        def encode(rate: int) -> bytes:
            tensor = run_session(self._head, pixels)[0].reshape(codec.channels, -1)
            return self._encode(tensor, rate)[0]

        def answer(code: bytes) -> list[Any]:
            return run_session(self._tail, codec.decode(code, self._bundle.positions)[0].reshape(shape))

        for rate, sent_bytes in enumerate(code_bytes):
            device_s = median_s(functools.partial(encode, rate))
            yield WayTime(f"code {rate}", device_s, median_s(functools.partial(answer, encode(rate))), sent_bytes)

    def _coded(self, latent: NDArray[np.float32], rate: int) -> tuple[int, NDArray[np.float32]]:
        """Return the bytes of an image's code at this rate, or a lower one, and what the code leaves of its latents."""
        codec = self._bundle.codec
        tensor = latent.reshape(codec.channels, -1)
        code, taken = self._encode(tensor, rate)
        overhead_bytes = len(code) - 1.05 * codec.entropy_bytes(tensor, taken)
        self.worst_overhead_bytes = max(self.worst_overhead_bytes, overhead_bytes)
        return len(code), codec.decode(code, self._bundle.positions)[0].reshape(latent.shape)

    def _encode(self, tensor: NDArray[np.float32], rate: int) -> tuple[bytes, int]:
        try:
            return self._bundle.codec.encode_within(tensor, rate, self._most_bytes)
        except CodeTooLong as error:
            raise NotSupported(
                f"{self._bundle.folder}: an image has a code of more than {MOST_PAYLOAD_BYTES:,} bytes at each rate; "
                "train with lower --rates"
            ) from error

    def original_bytes(self) -> float:
        """Return the mean bytes of the files as they are."""
        return float(np.mean([path.stat().st_size for path in self._images.paths]))

    def _batches(self) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
        for start in range(0, len(self._images), AT_ONCE):
            chosen = np.arange(start, min(start + AT_ONCE, len(self._images)))
            yield chosen, self._images.batch(chosen)

    def _right(self, answers: NDArray[Any], chosen: NDArray[Any]) -> int:
        return int((answers.argmax(1) == self._images.labels[chosen]).sum())


def coded_bytes(file: bytes) -> int:
    """Return what a JPEG or WebP file has of its own: the entropy-coded scan, or the frame in its container."""
    if file[:4] == b"RIFF":
        return len(file) - 20
    start = file.index(SCAN)
    return len(file) - start - 2 - int.from_bytes(file[start + 2 : start + 4], "big") - len(_END)


def _decoded(files: list[bytes], size: ImageSize) -> NDArray[np.uint8]:
    return np.stack([decode_image(one, size) for one in files])
