"""`SplitModel`: answers each frame the fastest way: here, or as a code or an image sent to a server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.closing import Closing
from edge_run.base.errors import ConfigError, ProtocolError
from edge_run.base.split import FrameReport, SplitStats
from edge_run.devices.link.hosts import parse_place
from edge_run.partition.latent_codec import CodeTooLong
from edge_run.partition.split_choice import CODE, IMAGE, LOCAL, Chooser, Mode
from edge_run.runtime.processes.forks import OwnerProcess
from edge_run.runtime.split import protocol
from edge_run.runtime.split.bundle import HEAD_FILE, MODEL_FILE, read_bundle
from edge_run.runtime.split.connection import ServerConnection
from edge_run.runtime.split.images import JPEG_START, ImageSize, decode_image, encode_image, pixels_of, read_image_bytes
from edge_run.runtime.split.onnx_session import median_s, run_session
from edge_run.runtime.split.protocol import DEFAULT_PORT, FrameRefused, LinkLost, unpack_arrays

AUTO, EMPTY = "auto", "empty"


@dataclass(frozen=True, slots=True)
class Frame:
    """An answered frame.

    outputs: of the network, by name; none of a frame that the filter held back.
    report: how it was answered.
    """

    outputs: dict[str, NDArray[Any]]
    report: FrameReport


class SplitModel(Closing):
    """A trained split on its device. A context manager. For one thread at a time.

    Every frame is answered: when the server does not answer in time, the device computes the frame itself, and all
    further ones until the server is back. One that leaves frames unanswered in turn is asked less and less often.

    It is over 200 lines because a frame that fails on its way to the server goes on where it is on the device.
    """

    def __init__(
        self,
        head: str | Path,
        server: str | None = None,
        *,
        deadline_s: float = 1.0,
        mode: str = AUTO,
        use_filter: bool = False,
        most_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Open `head`, the head.onnx of a bundle, and the uncut network beside it.

        server: HOST or HOST:PORT; None is none.
        deadline_s: the seconds that a frame may take, about: the server is waited for as long as leaves the device time
            to answer itself, but twice as long as it usually takes at least.
        mode: `auto` is the fastest; `local`, `image`, `code` (any rate) or `code N` (rate N, from 0) leave no choice
            while the server is there.
        use_filter: hold back frames without anything of interest; their `outputs` are empty.
        most_bytes: no code has more; the device computes frames whose codes would at any rate. None is no limit.
        threads: of the device; None is one for each core.

        Raises ConfigError, ModelFileError, NotSupported, TierReadError. A server that is not there is no error:
        `problem` says so.
        """
        if not 0 < deadline_s <= protocol.MOST_PATIENCE_S:
            raise ConfigError(f"deadline {deadline_s}: must be above 0 and at most {protocol.MOST_PATIENCE_S:.0f} s")
        self._bundle = read_bundle(Path(head))
        self._codec, self._deadline_s = self._bundle.codec, deadline_s
        if most_bytes is not None and most_bytes < 1:
            raise ConfigError(f"most bytes {most_bytes}: must be 1 or more")
        self._most_bytes = most_bytes
        filters = self._bundle.code.filters
        if use_filter and not filters:
            raise ConfigError(f"{head}: was trained without a filter; `edge-run split train --empty` trains one")
        self._threshold = filters[0].threshold if use_filter else 0.0
        modes = _modes(mode, len(self._codec.rates))
        address = None if server is None else parse_place(server, DEFAULT_PORT)
        self._head, self._model = self._bundle.open(HEAD_FILE, threads), self._bundle.open(MODEL_FILE, threads)
        self._owner_process = OwnerProcess()
        self._chooser = Chooser(modes, self._measure())
        for number, rate in enumerate(self._bundle.code.rates):
            self._chooser.sized(Mode(CODE, number), rate.coded_bytes // max(rate.images, 1))
        pixels = np.zeros(self._bundle.code.input, dtype=np.uint8)
        self._chooser.sized(Mode(IMAGE), len(encode_image(pixels)))  # until the first frame says better
        self._lock = threading.Lock()  # of the chooser, which the keeper tells what it measures
        self._counts: dict[str, int] = dict.fromkeys((LOCAL, CODE, IMAGE, EMPTY, "bytes", "losses", "refused"), 0)
        self._refusal = ""
        self._connection = None
        if address is not None:
            self._connection = ServerConnection(address, self._codec.fingerprint.hex(), self._chooser, self._lock)
            self._connection.start(min(deadline_s, 5.0))

    @property
    def problem(self) -> str:
        """Why there is no server; empty while there is one, or none was named."""
        return "" if self._connection is None else self._connection.problem

    @property
    def stats(self) -> SplitStats:
        """Figures since the model was opened."""
        with self._lock:
            chooser, counts = self._chooser, self._counts
            expected = {mode.name: chooser.expected_s(mode) for mode in _modes(AUTO, len(self._codec.rates))}
            return SplitStats(
                frames=sum(counts[kind] for kind in (LOCAL, CODE, IMAGE, EMPTY)),
                local=counts[LOCAL],
                code=counts[CODE],
                image=counts[IMAGE],
                empty=counts[EMPTY],
                sent_bytes=counts["bytes"],
                server_losses=counts["losses"],
                refused=counts["refused"],
                refusal=self._refusal,
                has_server=chooser.has_server,
                round_trip_s=chooser.round_trip_s or 0.0,
                bytes_per_s=chooser.bytes_per_s or 0.0,
                expected_s={name: seconds for name, seconds in expected.items() if seconds is not None},
            )

    def run(self, image: str | Path | bytes | NDArray[np.uint8]) -> Frame:
        """Answer one frame. image: a file, the bytes of one, or pixels (channels, height, width) of the network's size.

        Raises ModelFileError or ProtocolError for what is no image, TierReadError where its drive fails, ConfigError
        for pixels of another shape, KernelError where a network fails over it, and NotSupported in a forked child.
        """
        self._owner_process.check(self._bundle.folder)
        encoded, pixels = _open_image(image, self._bundle.size)
        started_s = time.perf_counter()
        interest, latent = -1.0, None
        if self._threshold:
            latent, interest = self._compute_head(pixels)
            if interest < self._threshold:
                return self._finish(Mode(EMPTY), started_s, [], interest=interest)
        with self._lock:
            if encoded is not None:
                self._chooser.sized(Mode(IMAGE), len(encoded))
            mode = self._chooser.choose(self._deadline_s)
        losses = self._counts["losses"]
        if mode.kind != LOCAL and self._connection is not None:
            with contextlib.suppress(CodeTooLong):
                body, mode = self._body(mode, encoded, pixels, latent)
                outputs = self._ask(mode, body, started_s)
                if outputs is not None:
                    return self._finish(mode, started_s, outputs, len(body), interest=interest)
        begun_s = time.perf_counter()
        outputs = run_session(self._model, pixels[None])
        self._bundle.check_answers(MODEL_FILE, outputs)
        with self._lock:
            self._chooser.computed(LOCAL, time.perf_counter() - begun_s)
        lost = self._counts["losses"] > losses
        return self._finish(Mode(LOCAL), started_s, outputs, lost=lost, interest=interest)

    def close(self) -> None:
        """End the connection to the server; again is no harm, nor is it in a forked child."""
        if self._connection is not None and self._owner_process.is_here:
            self._connection.close()

    def _measure(self) -> dict[str, float]:
        """Return the seconds that the device computes for each kind of mode."""
        pixels = np.zeros(self._bundle.code.input, dtype=np.uint8)

        def encode() -> None:
            with contextlib.suppress(CodeTooLong):  # of this image: it took its time all the same
                self._codec.encode(self._compute_head(pixels)[0], 0)

        return {
            LOCAL: median_s(lambda: run_session(self._model, pixels[None])),
            CODE: median_s(encode),
            IMAGE: 0.0,
        }

    def _compute_head(self, pixels: NDArray[np.uint8]) -> tuple[NDArray[np.float32], float]:
        """Return the latents (channels, positions), and how likely the frame is of interest, -1 without a filter."""
        made = run_session(self._head, pixels[None])
        self._bundle.check_answers(HEAD_FILE, made)
        return made[0].reshape(self._codec.channels, -1), float(made[1].reshape(-1)[0]) if len(made) > 1 else -1.0

    def _body(
        self, mode: Mode, encoded: bytes | None, pixels: NDArray[np.uint8], latent: NDArray[np.float32] | None
    ) -> tuple[bytes, Mode]:
        """Return what is sent in `mode`, and the mode it became: a code too large takes a lower rate.

        Raises CodeTooLong where it is too large at any rate.
        """
        begun_s = time.perf_counter()
        if mode.kind == IMAGE:
            data = encode_image(pixels) if encoded is None else encoded
            with self._lock:
                self._chooser.computed(IMAGE, time.perf_counter() - begun_s)
                self._chooser.sized(mode, len(data))
            return self._codec.fingerprint + data, mode
        if latent is None:
            latent, _ = self._compute_head(pixels)
        most_bytes = self._most_bytes or protocol.MOST_BODY_BYTES[protocol.ASK_CODE]
        code, rate = self._codec.encode_within(latent, mode.rate, most_bytes)
        with self._lock:
            self._chooser.computed(CODE, time.perf_counter() - begun_s)
            self._chooser.sized(Mode(CODE, rate), len(code))
        if len(code) > most_bytes:
            raise CodeTooLong(f"a code of {len(code)} bytes, at most {most_bytes} may be sent")
        return code, Mode(CODE, rate)

    def _ask(self, mode: Mode, body: bytes, started_s: float) -> list[NDArray[Any]] | None:
        """Return the server's answer; None where it refused, did not answer in time, or not as it should."""
        assert self._connection is not None, "there is a server to ask"
        with self._lock:
            spent_s = time.perf_counter() - started_s
            patience_s = self._chooser.patience_s(mode, self._deadline_s, spent_s)
        kind = protocol.ASK_CODE if mode.kind == CODE else protocol.ASK_IMAGE
        try:
            reply = self._connection.ask(kind, body, patience_s)
            outputs = unpack_arrays(reply.body)
            if len(outputs) != len(self._bundle.code.outputs) or not all(output.size for output in outputs):
                n_needed = len(self._bundle.code.outputs)
                raise ProtocolError(f"answer: {len(outputs)} arrays, needed are {n_needed} that are not empty")
        except FrameRefused as error:
            self._counts["refused"] += 1
            self._refusal = str(error)
            with self._lock:
                self._chooser.refused(mode.kind)
            return None
        except (LinkLost, ProtocolError) as error:
            self._counts["losses"] += 1
            with self._lock:
                self._chooser.unanswered(mode.kind)
            self._connection.lose(str(error), was_asked=True)
            return None
        with self._lock:
            self._chooser.crossed(len(body) + len(reply.body), reply.network_s)
            self._chooser.queued(reply.queue_s)
            self._chooser.served(mode.kind, reply.server_s, len(reply.body))
        return outputs

    def _finish(
        self, mode: Mode, started_s: float, outputs: list[NDArray[Any]], sent_bytes: int = 0, *, lost: bool = False,
        interest: float = -1.0,
    ) -> Frame:  # fmt: skip
        self._counts[mode.kind] += 1
        self._counts["bytes"] += sent_bytes
        first = outputs[0] if outputs else None
        has_classes = first is not None and first.ndim == 2 and len(first) > 0 and first.shape[1] > 1
        answer = int(outputs[0].argmax()) if has_classes else -1
        report = FrameReport(mode.name, sent_bytes, time.perf_counter() - started_s, lost, interest, answer)
        names = self._bundle.code.outputs if outputs else ()
        return Frame(dict(zip(names, outputs, strict=True)), report)


def _open_image(
    image: str | Path | bytes | NDArray[np.uint8], size: ImageSize
) -> tuple[bytes | None, NDArray[np.uint8]]:
    """Return the image as it can be sent, None where it must be encoded first, and its pixels in `size`."""
    if isinstance(image, np.ndarray):
        if image.shape != size.shape or image.dtype != np.uint8:
            raise ConfigError(f"image: {image.dtype} of shape {image.shape}; needed are bytes of shape {size.shape}")
        return None, image
    data = image if isinstance(image, bytes) else read_image_bytes(Path(image))
    pixels = decode_image(data, size) if isinstance(image, bytes) else pixels_of(Path(image), data, size)
    fits = data.startswith(JPEG_START) and len(data) < protocol.MOST_BODY_BYTES[protocol.ASK_IMAGE] - 16
    return (data if fits else None), pixels


def _modes(name: str, rates: int) -> Sequence[Mode]:
    """Return the modes that a name allows, the most accurate first, local always among them."""
    codes = [Mode(CODE, rate) for rate in reversed(range(rates))]
    local = Mode(LOCAL)
    allowed = {AUTO: [local, Mode(IMAGE), *codes], LOCAL: [local], IMAGE: [Mode(IMAGE)], CODE: codes}
    allowed.update((mode.name, [mode]) for mode in codes)
    if name not in allowed:
        raise ConfigError(f"mode {name!r}: must be one of {', '.join(allowed)}")
    return allowed[name]
