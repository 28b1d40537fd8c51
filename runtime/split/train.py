"""`edge-run split train`: from an ONNX network and a folder of images to a bundle that devices and servers can use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError, EdgeRunError, NotSupported
from edge_run.base.extras import TRAIN, need
from edge_run.base.files.whole import common_mode
from edge_run.base.split import RateReport, TrainReport
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import default_budget_bytes, process_memory
from edge_run.partition.latent_codec import MOST_PAYLOAD_BYTES, CodeTooLong, LatentCodec, fit_rate_to_size
from edge_run.partition.training_memory import (
    COPIES_OF_COVARIANCE,
    COPIES_OF_TENSORS,
    COPIES_OF_WEIGHTS,
    TrainingMemory,
    TrainingSizes,
    plan_training,
)
from edge_run.runtime.split.bottleneck import (
    Transform,
    blank_transform,
    check_cut,
    find_transform,
    make_decoder,
    make_encoder,
)
from edge_run.runtime.split.bundle import (
    CODE_FILE,
    FORMAT,
    HEAD_FILE,
    MODEL_FILE,
    MOST_CODE_JSON_BYTES,
    TAIL_FILE,
    StoredCode,
    StoredFilter,
    StoredRate,
    code_json,
    codec_identity,
    digest,
)
from edge_run.runtime.split.filter import add_filter, fit_filter
from edge_run.runtime.split.images import KEPT_BYTES, ImageFolder, ImageSize
from edge_run.runtime.split.networks import LATENT, Parts, chain, preprocessing, read_network, with_pooled
from edge_run.runtime.split.onnx_file import OnnxModel, describe, extract
from edge_run.runtime.split.onnx_session import check_finite, open_session, run_session
from edge_run.runtime.split.onnx_torch import TorchGraph, check_same
from edge_run.runtime.split.result_folder import check_result_folder, room_for_result
from edge_run.runtime.split.training import Quantiser, Student, TrainConfig, check_learning, train

HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 2000
MOST_PRIOR_IMAGES, MOST_TRANSFORM_IMAGES = 5000, 2000
AT_ONCE, AT_ONCE_BYTES = 100, 128 << 20  # images in a pass, and what the largest tensor of the network may take in it
SAMPLE_BYTES = 512 << 20  # of latents that are held to count them: of fewer images where they are large
FILTER_BYTES = 1 << 20  # more than a filter adds to the head
_NO_ANSWER = -2  # a class that no image has: -1 is that of images in no folder
_Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainTask:
    """What is to be trained: the network, its images, where it is cut, and the folder `out` that is written.

    empty: names of classes that hold nothing of interest; with any, a filter is trained.
    most_missed: the share of the other frames that the filter misses, about.
    most_images: to learn from; None is all.
    """

    model: Path
    data: Path
    cut: str
    out: Path
    empty: tuple[str, ...] = ()
    most_missed: float = 0.01
    most_images: int | None = None


def train_split(task: TrainTask, config: TrainConfig, show: _Show = lambda text: None) -> TrainReport:
    """Train a bottleneck and write its bundle to `task.out`. show: told how far it is.

    Raises ConfigError, ModelFileError, NotSupported or TierReadError. Then nothing was written to `task.out`; what was
    learned and could not be written there is in a folder that the error names.
    """
    need("torch", TRAIN)
    task = dataclasses.replace(task, out=check_result_folder(task.out))
    model = read_network(task.model)
    images = ImageFolder(task.data, ImageSize.of(model.shapes[model.input_name], str(task.model)), task.most_images)
    if unknown := sorted(set(task.empty) - set(images.classes)):
        raise ConfigError(
            f"--empty {unknown[0]}: no folder of {task.data}; there are {', '.join(images.classes) or 'none'}"
        )
    return _Workshop(task, config, model, images, show).run()


class _Workshop:
    """One training, from parts to files.

    It is over 200 lines because each step goes on with the networks that the one before has changed.
    """

    def __init__(
        self, task: TrainTask, config: TrainConfig, model: OnnxModel, images: ImageFolder, show: _Show
    ) -> None:
        self._task, self._config, self._model, self._images, self._show = task, config, model, images, show
        order = default_rng(config.seed).permutation(len(images))
        held_out = min(max(1, int(len(images) * HELD_OUT_SHARE)), MOST_HELD_OUT)
        self._held_out, self._chosen = order[:held_out], order[held_out:]
        if not len(self._chosen):
            raise ConfigError(f"--data {task.data}: holds {len(images)} images; at least 2 are needed")
        self._parts = Parts(model, task.cut)
        check_cut(config.shape, self._parts.cut, self._parts.cut_shape)
        self._pixels = preprocessing(model, config.mean, config.deviation)
        self._front = [one for one in (self._pixels, self._parts.front) if one is not None]
        self._whole = chain(model, self._pixels, extract(model, None, None).graph)
        self._teacher = open_session(self._whole.SerializeToString(), str(task.model), config.threads)

    def run(self) -> TrainReport:
        """Train, count the priors, measure, write."""
        self._memory = self._plan()
        self._images.kept_bytes = self._memory.kept_bytes
        with Ledger().grant(self._memory.needed_bytes, self._task.model.name):
            return self._run()

    def _run(self) -> TrainReport:
        mode = common_mode(self._task.model)
        _check_batches(self._teacher, self._images.size, self._task.model)
        _check_images(self._images, self._held_out, self._chosen, self._task.empty, self._show)
        pixels, name = self._images.batch(self._chosen[:2]), str(self._task.model)
        front, rest = (TorchGraph(one, name) for one in (chain(self._model, *self._front).graph, self._parts.rest))
        answers = run_session(self._teacher, pixels)
        check_finite(answers, f"{name}, {self._images.paths[int(self._chosen[0])]}")
        check_same([front, rest], pixels, answers, name)
        check_learning(front, rest, pixels, name)
        self._show("finding the transform")
        self._make_bottleneck(self._find_transform())
        sizes = {name: one.ByteSize() + FILTER_BYTES for name, one in self._networks().items()}
        with room_for_result(self._task.out, {**sizes, CODE_FILE: MOST_CODE_JSON_BYTES}, mode) as room:
            files, code = self._learn()
            room.write({**files, CODE_FILE: code_json(code)})
        return _report(self._task, self._model, (self._head_adds, len(files[HEAD_FILE])), len(self._chosen), code)

    def _learn(self) -> tuple[dict[str, bytes], StoredCode]:
        """Return the networks, trained, and what is measured of them."""
        head = open_session(
            chain(self._model, *self._front, self._encoder).SerializeToString(), HEAD_FILE, self._config.threads
        )
        quantiser = Quantiser(self._latents(head, MOST_TRANSFORM_IMAGES), self._config.rates_bytes)
        student = self._student(quantiser)
        train(student, self._images, self._chosen.tolist(), self._config, self._memory.at_once, self._show)
        for trained, graph in ((student.encoder, self._encoder), (student.decoder, self._decoder)):
            trained.write_into(graph)
        student.rest.write_into(self._parts.rest)
        filters = self._fit_filter()
        files = {name: network.SerializeToString() for name, network in self._networks().items()}
        self._show("counting the priors")
        return files, self._count(files, quantiser.gains(), filters)

    def _plan(self) -> TrainingMemory:
        """Return what there is room for. Raises BudgetError."""
        budget = self._config.memory_bytes or default_budget_bytes(Ledger().promised_bytes)
        blank = blank_transform(self._config.shape, self._parts.cut, self._parts.cut_shape)
        self._make_bottleneck(blank)
        networks = self._networks()
        halves = [describe(networks[name], self._task.model) for name in (HEAD_FILE, TAIL_FILE)]
        self._head_adds = halves[0].multiply_adds  # found out here: after the training nothing may fail for a report
        tensors = sum(sum(one.sizes_bytes.values()) for one in halves)
        weights = sum(one.ByteSize() for one in networks.values())
        transform = COPIES_OF_COVARIANCE * 8 * blank.mean.size**2
        batch, pixels, latents = self._config.batch, math.prod(self._images.size.shape), 4 * math.prod(self._latent)
        sizes = TrainingSizes(
            fixed=process_memory().held_bytes + COPIES_OF_WEIGHTS * weights // 2 + 2 * batch * pixels + transform,
            image=COPIES_OF_TENSORS * tensors + self._model.peak_bytes(),
            latents=latents,
            sample=min(SAMPLE_BYTES, latents * min(MOST_PRIOR_IMAGES, len(self._chosen))),
            kept=min(KEPT_BYTES, len(self._images) * pixels),
        )
        return plan_training(str(self._task.model), budget, min(batch, len(self._chosen)), sizes)

    def _networks(self) -> dict[str, Any]:
        """Return what is written, by name."""
        return {
            HEAD_FILE: chain(self._model, *self._front, self._encoder),
            TAIL_FILE: chain(self._model, self._decoder, self._parts.rest),
            MODEL_FILE: self._whole,
        }

    def _find_transform(self) -> Transform:
        """Return the transform of the tensors at the cut."""
        front = open_session(
            chain(self._model, *self._front).SerializeToString(), str(self._task.model), self._config.threads
        )
        tensors = (values for _, values in self._passes(front, self._chosen[:MOST_TRANSFORM_IMAGES]))
        return find_transform(self._config.shape, self._parts.cut, self._parts.cut_shape, tensors)

    def _make_bottleneck(self, transform: Transform) -> None:
        """Make encoder and decoder."""
        shape, cut, size = self._config.shape, self._parts.cut, self._parts.cut_shape
        self._encoder = make_encoder(shape, cut, size, LATENT, transform)
        self._decoder = make_decoder(shape, LATENT, cut, size, transform)
        latent = [one.dim_value for one in self._encoder.output[0].type.tensor_type.shape.dim][1:]
        self._latent = (int(latent[0]), int(latent[1]), int(latent[2]))

    def _student(self, quantiser: Quantiser) -> Student:
        name = str(self._task.model)
        return Student(
            front=TorchGraph(chain(self._model, *self._front).graph, name),
            encoder=TorchGraph(self._encoder, name),
            decoder=TorchGraph(self._decoder, name),
            rest=TorchGraph(self._parts.rest, name),
            quantiser=quantiser,
            teacher=self._teacher,
        )

    def _fit_filter(self) -> tuple[StoredFilter, ...]:
        """Train the filter where one was asked for, and add it to the encoder."""
        if not self._task.empty:
            return ()
        self._show("training the filter")
        hidden = str(self._encoder.node[-1].input[0])
        pooled = open_session(
            chain(self._model, *self._front, with_pooled(self._encoder, hidden)).SerializeToString(),
            "the filter", self._config.threads,
        )  # fmt: skip
        empty = [self._images.classes.index(name) for name in self._task.empty]
        features, labels = [], []
        for chosen in (self._chosen, self._held_out):
            features.append(np.concatenate([one for _, one in self._passes(pooled, chosen)]))
            labels.append(~np.isin(self._images.labels[chosen], empty))
        fitted = fit_filter((features[0], labels[0]), (features[1], labels[1]), self._task.most_missed)
        add_filter(self._encoder, hidden, fitted)
        self._head_adds += len(fitted.weights)
        return (fitted.stored,)

    def _passes(self, session: Any, chosen: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the numbers of images and the session's first output for them, batch by batch.

        Raises NotSupported where it is not finite.
        """
        at_once = min(max(AT_ONCE_BYTES // max(self._model.sizes_bytes.values()), 1), AT_ONCE, self._memory.at_once)
        for start in range(0, len(chosen), at_once):
            batch = chosen[start : start + at_once]
            values = run_session(session, self._images.batch(batch))[0]
            check_finite([values], f"{self._task.model}, {self._images.paths[int(batch[0])]} or an image near it")
            yield batch, values

    def _latents(self, head: Any, most_images: int) -> NDArray[np.float32]:
        """Return the latents of training images, of at most so many."""
        most = max(self._memory.sample_bytes // (4 * math.prod(self._latent)), 1)
        chosen = self._chosen[: min(most, most_images)]
        found, done = np.empty((len(chosen), *self._latent), dtype=np.float32), 0
        for batch, values in self._passes(head, chosen):
            found[done : done + len(batch)] = values
            done += len(batch)
        return found

    def _count(
        self, files: dict[str, bytes], gains: NDArray[np.float32], filters: tuple[StoredFilter, ...]
    ) -> StoredCode:
        """Return `code.json`: priors counted on training images, and each rate measured on those held out."""
        head = open_session(files[HEAD_FILE], HEAD_FILE, self._config.threads)
        rows = (self._latent[0], self._latent[1] * self._latent[2])
        seen = self._latents(head, MOST_PRIOR_IMAGES)
        wanted = zip(gains.tolist(), self._config.rates_bytes, strict=True)
        rates = tuple(fit_rate_to_size(seen.reshape(len(seen), *rows), one, size) for one, size in wanted)
        outputs = tuple(one.name for one in self._parts.rest.output)
        code = StoredCode(
            FORMAT, digest(files[MODEL_FILE]), digest(files[HEAD_FILE]), digest(files[TAIL_FILE]), self._parts.cut,
            self._images.size.shape, self._latent, outputs, (), filters,
        )  # fmt: skip
        codec = LatentCodec(*codec_identity(code), rates)
        measured = tuple(self._measure(codec, number, files) for number in range(len(rates)))
        return dataclasses.replace(code, rates=measured)

    def _measure(self, codec: LatentCodec, rate: int, files: dict[str, bytes]) -> StoredRate:
        """Return a rate with its sizes and answers on the images that were held out.

        An image without a code, since at each rate it would be too long, is answered wrongly in the longest one.
        """
        self._show(f"measuring rate {rate + 1} of {len(codec.rates)}")
        head, tail = (open_session(files[name], name, self._config.threads) for name in (HEAD_FILE, TAIL_FILE))
        sizes: list[int] = []
        agreeing = right = model_right = 0
        for chosen, latents in self._passes(head, self._held_out):
            codes = [_code(codec, one, rate) for one in latents]
            sizes += [len(one) if one else MOST_PAYLOAD_BYTES for one in codes]
            decoded = np.zeros(latents.shape, dtype=np.float32)
            for row, one in zip(decoded, codes, strict=True):
                if one:
                    row[:] = codec.decode(one, latents[0][0].size)[0].reshape(row.shape)
            mine = _classes(run_session(tail, decoded)[0])
            wanted = _classes(run_session(self._teacher, self._images.batch(chosen))[0])
            if mine is not None and wanted is not None:
                labels = self._images.labels[chosen]
                mine = np.where([one is not None for one in codes], mine, _NO_ANSWER)
                agreeing += int((mine == wanted).sum())
                right, model_right = right + int((mine == labels).sum()), model_right + int((wanted == labels).sum())
        measured = (len(sizes), sum(sizes), max(sizes), agreeing, right, model_right)
        return StoredRate(self._config.rates_bytes[rate], codec.rates[rate], *measured)


def _check_images(
    images: ImageFolder, held_out: NDArray[Any], chosen: NDArray[Any], empty: Sequence[str], show: _Show
) -> None:
    """Raise for what no training can use, before hours of it: a file that is no image, nothing to tell apart."""
    is_empty = np.isin(images.labels[chosen], [images.classes.index(name) for name in empty])
    if empty and (is_empty.all() or not is_empty.any()):
        raise ConfigError("--empty: a filter needs images of both kinds, of interest and not; there are too few")
    for number, index in enumerate((*held_out, *chosen), 1):
        show(f"looking at image {number:,} of {len(images):,}")
        images.batch(np.array([index]))


def _check_batches(teacher: Any, size: ImageSize, model: Path) -> None:
    """Refuse a network that takes one image at a time: training needs batches."""
    try:
        made = run_session(teacher, np.zeros((2, *size.shape), dtype=np.uint8))
    except EdgeRunError as error:
        raise NotSupported(f"{model}: takes one image at a time; export it with an open batch") from error
    if any(one.shape[:1] != (2,) for one in made):
        raise NotSupported(f"{model}: its answers have no batch as their first dimension; training needs one")


def _report(task: TrainTask, model: OnnxModel, head: tuple[int, int], images: int, code: StoredCode) -> TrainReport:
    """Return what was made. head: its multiply-adds and its bytes."""
    (adds, head_bytes), everything = head, model.multiply_adds
    return TrainReport(
        folder=str(task.out),
        images=images,
        head_multiply_adds=adds,
        head_share=adds / everything if everything else 0.0,
        head_bytes=head_bytes,
        rates=tuple(rate_report(one) for one in code.rates),
    )


def rate_report(rate: StoredRate) -> RateReport:
    """Return what was measured of a rate, as shares."""
    images = rate.images or 1
    return RateReport(
        target_bytes=rate.target_bytes,
        mean_bytes=rate.coded_bytes / images,
        largest_bytes=rate.largest_bytes,
        agreement=rate.agreeing / images,
        accuracy=rate.right / images,
        model_accuracy=rate.model_right / images,
    )


def _code(codec: LatentCodec, latents: NDArray[np.float32], rate: int) -> bytes | None:
    """Return the code of an image's latents, at this rate or a lower one; None where each would be too long."""
    try:
        return codec.encode_within(latents.reshape(codec.channels, -1), rate, MOST_PAYLOAD_BYTES)[0]
    except CodeTooLong:
        return None


def _classes(answers: NDArray[Any]) -> NDArray[Any] | None:
    """Return the class of each answer of shape (batch, n); None for answers of another kind."""
    return answers.argmax(1) if answers.ndim == 2 and answers.shape[1] > 1 else None
