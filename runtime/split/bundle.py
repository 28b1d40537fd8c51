"""What `split train` leaves in a folder, and the other commands read: three networks and `code.json`.

head.onnx    pixels -> latents (and `interest`, where a filter was trained): runs on the device
tail.onnx    latents -> answers: runs on the server
model.onnx   pixels -> answers: the uncut network, for either side
code.json    the codec and what was measured; fingerprints of the three
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_run.base.errors import ModelFileError, ModelFileMissing
from edge_run.base.strict_json import decode, parse
from edge_run.base.units import format_count
from edge_run.partition.latent_codec import LatentCodec, Rate
from edge_run.runtime.split.images import ImageSize, read_bytes
from edge_run.runtime.split.onnx_session import MOST_NETWORK_BYTES, MOST_VALUES, open_session, run_session

HEAD_FILE, TAIL_FILE, MODEL_FILE, CODE_FILE = "head.onnx", "tail.onnx", "model.onnx", "code.json"
FORMAT = "edge-run split 2"
MOST_CODE_JSON_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StoredRate:
    """A rate, and what was measured with it on images that were held out.

    images: how many.
    coded_bytes: of all their codes.
    largest_bytes: of the largest code.
    agreeing: images that are answered as the uncut network answers.
    right: images that are answered with the class of their folder.
    model_right: images that the uncut network answers with it.
    """

    target_bytes: int
    rate: Rate
    images: int
    coded_bytes: int
    largest_bytes: int
    agreeing: int
    right: int
    model_right: int


@dataclass(frozen=True, slots=True)
class StoredFilter:
    """When a frame holds nothing of interest, as measured on images that were held out.

    threshold: of the head's second output; below it nothing is sent.
    interesting: images that hold something of interest.
    missed: interesting images that would not be sent.
    empty: images that hold nothing.
    dropped: empty images that would not be sent.
    """

    threshold: float
    interesting: int
    missed: int
    empty: int
    dropped: int


@dataclass(frozen=True, slots=True)
class StoredCode:
    """`code.json`.

    model, head, tail: SHA-256 of the files.
    filters: one or none.
    latent: channels, height, width.
    """

    format: str
    model: str
    head: str
    tail: str
    cut: str
    input: tuple[int, int, int]
    latent: tuple[int, int, int]
    outputs: tuple[str, ...]
    rates: tuple[StoredRate, ...]
    filters: tuple[StoredFilter, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A trained split, read from its folder."""

    folder: Path
    code: StoredCode
    codec: LatentCodec

    @property
    def positions(self) -> int:
        """Positions of a latent tensor: height times width."""
        return self.code.latent[1] * self.code.latent[2]

    @property
    def size(self) -> ImageSize:
        """The images that the networks take."""
        return ImageSize(*self.code.input)

    def checked(self, name: str) -> bytes:
        """Return the file `name` of this bundle.

        Raises ModelFileError where it is missing or not the one trained, TierReadError by its drive.
        """
        data = read_bytes(self.folder / name, MOST_NETWORK_BYTES, "a network")
        wanted = {HEAD_FILE: self.code.head, TAIL_FILE: self.code.tail, MODEL_FILE: self.code.model}[name]
        if digest(data) != wanted:
            raise ModelFileError(
                f"{self.folder / name}: is not the one that {CODE_FILE} describes; train again, or copy both"
            )
        return data

    def open(self, name: str, threads: int | None) -> Any:
        """Return a session of the network `name` of this bundle.

        Raises as `checked`, ModelFileError also where it does not fit `code.json`, and KernelError where it fails.
        """
        session = open_session(self.checked(name), str(self.folder / name), threads)
        shape, kind = ((1, *self.code.latent), "float") if name == TAIL_FILE else ((1, *self.code.input), "uint8")
        taken = [(one.type, tuple(one.shape)) for one in session.get_inputs()]
        if len(taken) != 1 or taken[0][0] != f"tensor({kind})" or not _may_be(taken[0][1], shape):
            found = ", ".join(f"{type_name} of {_times(size)}" for type_name, size in taken)
            raise self._misfit(name, f"takes {found or 'nothing'}, needed is tensor({kind}) of {_times(shape)}")
        self.check_answers(name, run_session(session, np.zeros(shape, np.float32 if kind == "float" else np.uint8)))
        return session

    def check_answers(self, name: str, made: Sequence[Any]) -> None:
        """Raise ModelFileError where the network `name` made other tensors of one frame than `code.json` says."""
        is_right = all(isinstance(one, np.ndarray) and one.dtype.kind in "biuf" for one in made)
        if name == HEAD_FILE:
            shape, has_filter = (1, *self.code.latent), bool(self.code.filters)
            needed = f"float32 of {_times(shape)}{', and the interest' * has_filter}"
            is_right = is_right and len(made) == 1 + has_filter and all(one.size for one in made)
            is_right = is_right and (made[0].dtype, made[0].shape) == (np.float32, shape)
        else:
            n_outputs = len(self.code.outputs)
            needed = f"numbers in {format_count(n_outputs, 'tensor')}"  # of no object, where it finds none
            is_right = is_right and len(made) == n_outputs
        if not is_right:
            found = ", ".join(f"{one.dtype} of {_times(one.shape)}" for one in made if isinstance(one, np.ndarray))
            raise self._misfit(name, f"makes {found[:200] or 'no tensor'}, needed is {needed}")

    def _misfit(self, name: str, why: str) -> ModelFileError:
        place = self.folder / name
        return ModelFileError(
            f"{place}: does not fit {CODE_FILE} beside it, {why}; train again, or copy all files together"
        )


def read_bundle(path: Path) -> Bundle:
    """Return the bundle that the file `path` (head.onnx or tail.onnx) or the folder `path` belongs to.

    Raises ModelFileError where `code.json` is missing, damaged or of another version, TierReadError by its drive.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ModelFileMissing(f"{path}: there is no such file; `edge-run split train` makes one")
    source = folder / CODE_FILE
    try:
        value = parse(read_bytes(source, MOST_CODE_JSON_BYTES, "one of ours"))
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise ValueError(f"its format is {str(value.get('format'))[:40]!r}, needed is {FORMAT!r}")
        code = decode(StoredCode, value)
        return Bundle(folder, code, _codec(code))
    except ValueError as error:
        raise ModelFileError(f"{source}: cannot be read ({str(error)[:200]}); train again") from error


def code_json(code: StoredCode) -> bytes:
    """Return what `code.json` holds."""
    return json.dumps(asdict(code)).encode()


def digest(data: bytes) -> str:
    """Return the SHA-256 of `data`, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def codec_identity(code: StoredCode) -> tuple[str, str]:
    """Return what a codec's fingerprints of model and cut are made of."""
    return f"{code.model} {code.tail}", code.cut


def _may_be(declared: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor declared so, sizes that are open as names or None, may have this shape."""
    if not declared:  # nothing is declared
        return True
    sizes = zip(declared, shape, strict=False)
    return len(declared) == len(shape) and all(size == one for size, one in sizes if isinstance(size, int))


def _times(shape: Sequence[Any]) -> str:
    return " x ".join(map(str, shape))[:100]


def _codec(code: StoredCode) -> LatentCodec:
    if code.input[0] not in (1, 3):
        raise ValueError(f"images of {code.input[0]} channels, there are those of 1 and of 3")
    for name, shape in (("images", code.input), ("latents", code.latent)):
        if not 0 < math.prod(shape) <= MOST_VALUES:
            raise ValueError(f"{name} of {' x '.join(map(str, shape))} values, 1 to {MOST_VALUES} make sense")
    channels = code.latent[0]
    rates = tuple(stored.rate for stored in code.rates)
    if any(len(rate.gains) != channels for rate in rates):
        raise ValueError(f"a rate without {channels} channels")
    return LatentCodec(*codec_identity(code), rates)
