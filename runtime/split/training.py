"""Trains a bottleneck on a CPU: first to make the teacher's features, then to make the teacher's answers.

The teacher is the uncut network. Its layers before the cut stay as they are. Encoder and decoder learn in both stages,
the layers after the cut learn in the second. For each rate and channel a gain is learnt, and a logistic distribution
that stands in for the prior. Each image of a batch is coded at a rate drawn at random, so one training gives all rates.
Rounding passes gradients straight through (Bengio et al., 2013); the two stages are those of Matsubara et al., 2022
(Supervised Compression), the gains those of Cui et al., 2021. Unlike theirs, this loss has no trade-off to tune: a rate
costs nothing until its codes exceed the bytes that were asked for.

Where a batch has no room in memory, its parts are computed in turn and their gradients are added up: the same, since
what the loss needs to know of the whole batch is found in a pass before.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from edge_run.base.config import check_threads
from edge_run.base.errors import ConfigError, NotSupported
from edge_run.base.extras import TRAIN, need
from edge_run.devices.host.machine import compute_threads
from edge_run.partition.entropy_coding import fit_table
from edge_run.partition.latent_codec import LARGEST_SYMBOL, MOST_PAYLOAD_BYTES, MOST_RATES
from edge_run.runtime.split.bottleneck import BottleneckShape
from edge_run.runtime.split.images import ImageFolder
from edge_run.runtime.split.onnx_session import first_line, run_session
from edge_run.runtime.split.onnx_torch import TorchGraph

MOST_RATE_BYTES = MOST_PAYLOAD_BYTES // 4  # on average: codes of some images are much longer
HEADER_BYTES = 9  # of a code, with what the range coder's end and priors of other images take
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a bottleneck is trained.

    rates_bytes: for each rate, what a code should have on average.
    mean, deviation: of pixels, on the scale of 0 to 1.
    feature_epochs, answer_epochs: passes over the images in either stage.
    flips: mirror half of the images.
    rate_weight: the loss where the codes of a rate have twice its bytes.
    threads: None is one for each core.
    memory_bytes: the budget of the whole process; None is what is available, less a margin.
    """

    rates_bytes: tuple[int, ...] = (64, 128, 192, 256)
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    feature_epochs: float = 0.5
    answer_epochs: float = 2.0
    batch: int = 128
    learning_rate: float = 1e-3
    rate_weight: float = 0.5
    flips: bool = True
    seed: int = 0
    threads: int | None = None
    memory_bytes: int | None = None
    shape: BottleneckShape = field(default_factory=BottleneckShape)

    def __post_init__(self) -> None:
        rates = self.rates_bytes
        is_in_order = 1 <= len(rates) <= MOST_RATES and list(rates) == sorted(set(rates))
        if not is_in_order or not HEADER_BYTES < rates[0] <= rates[-1] <= MOST_RATE_BYTES:
            raise ConfigError(
                f"rates {', '.join(map(str, rates))}: must be 1 to {MOST_RATES} sizes in ascending order, each above "
                f"{HEADER_BYTES} bytes and at most {MOST_RATE_BYTES}"
            )
        for name in ("feature_epochs", "answer_epochs"):
            if not 0 <= getattr(self, name) <= 1000:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)}: must be 0 to 1000")
        check_threads(self.threads)
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed {self.seed}: must be 0 to {(1 << 64) - 1}")
        if not 1 <= self.batch <= 4096:
            raise ConfigError(f"batch {self.batch}: must be 1 to 4096 images")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning rate {self.learning_rate}: must be above 0 and at most 1")


class Quantiser:
    """Gains, rounding and the stand-in prior of every rate, as PyTorch parameters of (rates, channels)."""

    def __init__(self, latents: NDArray[np.float32], rates_bytes: Sequence[int]) -> None:
        """Begin with one step for all channels, so that `latents` (n, channels, height, width) have these sizes."""
        torch = need("torch", TRAIN)
        rows = latents.transpose(1, 0, 2, 3).reshape(latents.shape[1], -1)
        steps = [_find_step(rows, len(latents), (one - HEADER_BYTES) * 8.0) for one in rates_bytes]
        log_gain = -np.log(np.array(steps, dtype=np.float32))[:, None].repeat(len(rows), 1)
        scale = np.maximum(rows.std(1) * np.exp(log_gain) * (3**0.5 / np.pi), 0.1)
        self.log_gain, self.log_scale, self.centre = (
            torch.tensor(one.astype(np.float32), requires_grad=True)
            for one in (log_gain, np.log(scale), np.zeros_like(log_gain))
        )

    def parameters(self) -> list[Any]:
        """Return what learns."""
        return [self.log_gain, self.centre, self.log_scale]

    def __call__(self, latent: Any, rates: Any) -> tuple[Any, Any]:
        """Return what is left of `latent` (batch, channels, height, width), and the bits of each image (batch,)."""
        torch = need("torch", TRAIN)
        gain, scale = (one[rates].exp()[:, :, None, None] for one in (self.log_gain, self.log_scale))
        scaled = latent.float() * gain
        rounded = scaled + (scaled.round() - scaled).detach()
        away = rounded - self.centre[rates][:, :, None, None]
        share = torch.sigmoid((away + 0.5) / scale) - torch.sigmoid((away - 0.5) / scale)
        return rounded / gain, -share.clamp_min(1e-5).log2().sum((1, 2, 3))

    def gains(self) -> NDArray[np.float32]:
        """Return the gains (rates, channels)."""
        return np.asarray(self.log_gain.detach().exp().numpy(), dtype=np.float32)


@dataclass(slots=True)
class Student:
    """The networks of a training.

    front: pixels to the cut.
    teacher: an onnxruntime session of the uncut network.
    """

    front: TorchGraph
    encoder: TorchGraph
    decoder: TorchGraph
    rest: TorchGraph
    quantiser: Quantiser
    teacher: Any


def train(
    student: Student,
    images: ImageFolder,
    chosen: Sequence[int],
    config: TrainConfig,
    at_once: int,
    show: Callable[[str], None],
) -> None:
    """Teach `student` on the images of these numbers, so many of them at once.

    show: told how far it is, again and again. Raises NotSupported where the training diverges.
    """
    torch = need("torch", TRAIN)
    torch.manual_seed(config.seed)
    torch.set_num_threads(compute_threads(config.threads))
    trainer = _Trainer(student, images, np.array(chosen), config, at_once, show)
    trainer.run("features", config.feature_epochs)
    trainer.run("answers", config.answer_epochs)


class _Trainer:
    """The loop over batches, for both stages."""

    def __init__(
        self,
        student: Student,
        images: ImageFolder,
        chosen: NDArray[Any],
        config: TrainConfig,
        at_once: int,
        show: Callable[[str], None],
    ) -> None:
        torch = need("torch", TRAIN)
        self._at_once = at_once
        self._student, self._images, self._chosen, self._config, self._show = student, images, chosen, config, show
        self._generator = default_rng(config.seed)
        self._batch = min(config.batch, len(chosen))
        self._targets = torch.tensor([(one - HEADER_BYTES) * 8.0 for one in config.rates_bytes])
        self._new = student.encoder.parameters() + student.decoder.parameters()
        self._rest = student.rest.parameters()

    def run(self, stage: str, epochs: float) -> None:
        """Train one stage, with a learning rate that rises and falls once (Smith, 2018)."""
        torch = need("torch", TRAIN)
        if not epochs:
            return
        steps = max(round(epochs * len(self._chosen) / self._batch), 1)
        rate = self._config.learning_rate / (1 if stage == "features" else 2)
        groups = [{"params": self._new, "lr": rate}, {"params": self._student.quantiser.parameters(), "lr": 10 * rate}]
        if stage == "answers":
            groups.append({"params": self._rest, "lr": rate / 3})
        optimiser = torch.optim.Adam(groups)
        rise = 0.11 if steps == 10 else 0.1  # a tenth of ten steps ends at the first, and PyTorch divides by that
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, [one["lr"] for one in groups], total_steps=max(steps, 2), pct_start=rise
        )
        started_s, seen = time.monotonic(), []
        for step in range(steps):
            optimiser.zero_grad(set_to_none=True)
            distortion = self._add_gradients(stage)
            norm = float(torch.nn.utils.clip_grad_norm_([*self._new, *self._rest], 5.0))
            if not math.isfinite(distortion + norm):
                raise NotSupported(
                    f"{stage}: the training diverged at step {step + 1} of {steps}; check that --mean and --std are "
                    "those of the network, or cut at another tensor"
                )
            optimiser.step()
            schedule.step()
            seen.append(distortion)
            left_s = (time.monotonic() - started_s) / (step + 1) * (steps - step - 1)
            recent = float(np.mean(seen[-50:]))
            self._show(f"{stage}: step {step + 1} of {steps}, loss {recent:.3f}, about {left_s / 60:.0f} min left")
            if step % 50 == 49 or step == steps - 1:
                _log.info("%s: step %d of %d, loss %.4f, %.0f s left", stage, step + 1, steps, recent, left_s)

    def _add_gradients(self, stage: str) -> float:
        """Add the gradients of a batch to the weights that learn; return how far it is from what is wanted."""
        torch = need("torch", TRAIN)
        pixels = self._images.batch(self._generator.choice(self._chosen, self._batch, replace=False))
        if self._config.flips and self._generator.random() < 0.5:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        rates = torch.from_numpy(self._generator.integers(0, len(self._targets), len(pixels)))
        parts = [slice(start, start + self._at_once) for start in range(0, len(pixels), self._at_once)]
        known = _Batch(self._targets)
        if len(parts) > 1:
            with torch.no_grad():
                for part in parts:
                    known.add(*self._coded(stage, pixels[part], rates[part])[1:], rates[part])
        total = 0.0
        for part in parts:
            left, wanted, bits = self._coded(stage, pixels[part], rates[part])
            if len(parts) == 1:
                known.add(wanted, bits, rates)
            distortion = known.distance(self._made(stage, left), wanted)
            (distortion + self._config.rate_weight * (bits * known.bit_weights()[rates[part]]).sum()).backward()
            total += float(distortion.detach())
        return total

    def _coded(self, stage: str, pixels: NDArray[np.uint8], rates: Any) -> tuple[Any, list[Any], Any]:
        """Return what codes of these images leave of their latents, what is to be made of it, and the codes' bits."""
        torch = need("torch", TRAIN)
        student, batch = self._student, torch.from_numpy(pixels).contiguous(memory_format=torch.channels_last)
        with mixed_precision():
            with torch.no_grad():
                (at_cut,) = student.front(batch)
            left, bits = student.quantiser(student.encoder(at_cut)[0], rates)
        if stage == "features":
            return left, [at_cut.float()], bits
        return left, [torch.from_numpy(one) for one in run_session(student.teacher, pixels)], bits

    def _made(self, stage: str, left: Any) -> list[Any]:
        torch = need("torch", TRAIN)
        with mixed_precision():
            made = self._student.decoder(left.contiguous(memory_format=torch.channels_last))
            return [one.float() for one in (made if stage == "features" else self._student.rest(*made))]


class _Batch:
    """What the loss of a part of a batch has to know of all of it, as its parts are added."""

    def __init__(self, targets: Any) -> None:
        """targets: the bits of a code, for each rate."""
        torch = need("torch", TRAIN)
        self._targets, self._images = targets, 0
        self._bits, self._codes = torch.zeros_like(targets), torch.zeros_like(targets)
        self._spreads: list[tuple[int, float, float]] = []  # of each tensor: values, mean, sum of squares about it

    def add(self, wanted: Sequence[Any], bits: Any, rates: Any) -> None:
        """Take in a part: what is to be made, and the bits of its codes at these rates."""
        torch = need("torch", TRAIN)
        self._images += len(bits)
        self._bits.index_add_(0, rates, bits.detach())
        self._codes.index_add_(0, rates, torch.ones_like(bits))
        before, self._spreads = self._spreads or [(0, 0.0, 0.0)] * len(wanted), []
        for (count, mean, squares), one in zip(before, wanted, strict=True):
            spread, middle = (float(found) for found in torch.var_mean(one.float(), correction=0))
            number, whole = one.numel(), count + one.numel()
            between = (middle - mean) ** 2 * count * number / whole  # Chan et al., 1979
            squares_of_both = squares + spread * number + between
            self._spreads.append((whole, mean + (middle - mean) * number / whole, squares_of_both))

    def bit_weights(self) -> Any:
        """Return, for each rate, what a bit adds to how often its mean code is doubled beyond its bytes."""
        torch = need("torch", TRAIN)
        codes = self._codes.clamp_min(1)
        mean = self._bits / codes
        return torch.where(mean > self._targets, 1 / (mean.clamp_min(1e-12) * math.log(2) * codes), 0.0)

    def distance(self, made: Sequence[Any], wanted: Sequence[Any]) -> Any:
        """Return what a part adds to the distance of the batch from what is to be made.

        Of classes it is the divergence of their probabilities, else the mean square as a share of the variance. Classes
        are what has a shape of (batch, n): probabilities where rows add up to 1, else logits (Hinton et al., 2015, with
        a temperature of 2).
        """
        functions = need("torch", TRAIN).nn.functional
        total = 0.0
        for one, target, (count, _, squares) in zip(made, wanted, self._spreads, strict=True):
            if target.dim() != 2 or target.shape[1] < 2:
                variance = max(squares / max(count - 1, 1), 1e-12)
                total = total + ((one - target.float()) ** 2).sum() / (count * variance)
                continue
            if bool((target >= 0).all()) and bool(((target.sum(1) - 1).abs() < 1e-3).all()):
                pair = (one.clamp_min(1e-6).log(), target.clamp_min(1e-6).log())
            else:
                pair = (one, target.float())
            found, right = (functions.log_softmax(logits / 2, 1) for logits in pair)
            divergence = functions.kl_div(found, right, reduction="sum", log_target=True)
            total = total + 4 * divergence / self._images
        return total


def mixed_precision() -> Any:
    """Return the block in which PyTorch computes with 16 bits, where this processor has instructions for that."""
    torch = need("torch", TRAIN)
    is_fast = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_fast)


def check_learning(front: TorchGraph, rest: TorchGraph, pixels: NDArray[np.uint8], name: str) -> None:
    """Raise NotSupported where no gradient comes through `rest`, which takes what `front` makes of `pixels`."""
    torch = need("torch", TRAIN)
    rest.parameters()
    try:
        with mixed_precision():
            with torch.no_grad():
                (at_cut,) = front(torch.from_numpy(pixels))
            made = rest(at_cut.float().requires_grad_(True))
        torch.stack([one.float().sum() for one in made]).sum().backward()
    except RuntimeError as error:
        raise NotSupported(f"{name}: PyTorch computes it, but cannot train it ({first_line(error)})") from error


def _find_step(rows: NDArray[np.float32], images: int, bits: float) -> float:
    """Return the step of rounding at which `rows` (channels, values) of this many images take `bits` each."""
    low, high = 1e-4, 1e4
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        taken = sum(
            fit_table(np.rint(row / max(middle, np.abs(row).max() / LARGEST_SYMBOL)).astype(np.int32)).entropy_bits
            for row in rows
        )
        low, high = (low, middle) if taken * rows.shape[1] / images < bits else (middle, high)
    return high
