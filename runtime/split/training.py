"""Trains a bottleneck on a CPU: first to make the teacher's features, then to make the teacher's answers.

The teacher is the uncut network. Its layers before the cut stay as they are. Encoder and decoder learn in both stages,
the layers after the cut learn in the second. For each rate and channel a gain is learnt, and a logistic distribution
that stands in for the prior. Each image of a batch is coded at a rate drawn at random, so one training gives all rates.
Rounding passes gradients straight through (Bengio et al., 2013); the two stages are those of Matsubara et al., 2022
(Supervised Compression), the gains those of Cui et al., 2021. Unlike theirs, this loss has no trade-off to tune: a rate
costs nothing until its codes exceed the bytes that were asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from edge_run.base.config import check_threads
from edge_run.base.errors import ConfigError
from edge_run.base.extras import TRAIN, need
from edge_run.devices.host.machine import usable_cpus
from edge_run.partition.entropy_coding import fit_table
from edge_run.partition.latent_codec import LARGEST_SYMBOL, MOST_PAYLOAD_BYTES, MOST_RATES
from edge_run.runtime.split.bottleneck import BottleneckShape
from edge_run.runtime.split.images import ImageFolder
from edge_run.runtime.split.onnx_session import run_session
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
    student: Student, images: ImageFolder, chosen: Sequence[int], config: TrainConfig, show: Callable[[str], None]
) -> None:
    """Teach `student` on the images of these numbers. show: told how far it is, again and again."""
    torch = need("torch", TRAIN)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads or len(usable_cpus()))
    trainer = _Trainer(student, images, np.array(chosen), config, show)
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
        show: Callable[[str], None],
    ) -> None:
        torch = need("torch", TRAIN)
        self._student, self._images, self._chosen, self._config, self._show = student, images, chosen, config, show
        self._generator = default_rng(config.seed)
        self._batch = min(config.batch, len(chosen))
        self._targets = torch.tensor([(one - HEADER_BYTES) * 8.0 for one in config.rates_bytes])
        self._new = student.encoder.parameters() + student.decoder.parameters()
        self._rest = student.rest.parameters()
        self._has_bfloat16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())

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
            loss, distortion = self._loss(stage)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*self._new, *self._rest], 5.0)
            optimiser.step()
            schedule.step()
            seen.append(distortion)
            left_s = (time.monotonic() - started_s) / (step + 1) * (steps - step - 1)
            recent = float(np.mean(seen[-50:]))
            self._show(f"{stage}: step {step + 1} of {steps}, loss {recent:.3f}, about {left_s / 60:.0f} min left")
            if step % 50 == 49 or step == steps - 1:
                _log.info("%s: step %d of %d, loss %.4f, %.0f s left", stage, step + 1, steps, recent, left_s)

    def _loss(self, stage: str) -> tuple[Any, float]:
        torch = need("torch", TRAIN)
        student = self._student
        pixels = self._images.batch(self._generator.choice(self._chosen, self._batch, replace=False))
        if self._config.flips and self._generator.random() < 0.5:
            pixels = np.ascontiguousarray(pixels[..., ::-1])
        rates = torch.from_numpy(self._generator.integers(0, len(self._targets), len(pixels)))
        batch = torch.from_numpy(pixels).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._has_bfloat16):
            with torch.no_grad():
                (at_cut,) = student.front(batch)
            left, bits = student.quantiser(student.encoder(at_cut)[0], rates)
            (made,) = student.decoder(left.contiguous(memory_format=torch.channels_last))
            if stage == "features":
                distortion = _relative_error(made.float(), at_cut.float())
            else:
                answers = [torch.from_numpy(one) for one in run_session(student.teacher, pixels)]
                distortion = _answer_error([one.float() for one in student.rest(made)], answers)
        return distortion + self._config.rate_weight * self._excess(bits, rates), float(distortion.detach())

    def _excess(self, bits: Any, rates: Any) -> Any:
        """Return how often the mean code of each rate is doubled beyond its bytes, added up."""
        torch = need("torch", TRAIN)
        present = [number for number in range(len(self._targets)) if bool((rates == number).any())]
        return sum(torch.relu(torch.log2(bits[rates == one].mean() / self._targets[one])) for one in present)


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


def _relative_error(made: Any, wanted: Any) -> Any:
    """Return the mean square error as a share of the variance."""
    return ((made - wanted) ** 2).mean() / wanted.var().clamp_min(1e-12)


def _answer_error(made: Sequence[Any], wanted: Sequence[Any]) -> Any:
    """Return how far answers are from the teacher's: of classes the divergence of their probabilities, else squares.

    Classes are what has a shape of (batch, n): probabilities where rows add up to 1, else logits (Hinton et al., 2015,
    with a temperature of 2).
    """
    functions = need("torch", TRAIN).nn.functional
    total = 0.0
    for one, target in zip(made, wanted, strict=True):
        if target.dim() != 2 or target.shape[1] < 2:
            total = total + _relative_error(one, target.float())
            continue
        if bool((target >= 0).all()) and bool(((target.sum(1) - 1).abs() < 1e-3).all()):
            pair = (one.clamp_min(1e-6).log(), target.clamp_min(1e-6).log())
        else:
            pair = (one, target)
        found, right = (functions.log_softmax(logits / 2, 1) for logits in pair)
        total = total + 4 * functions.kl_div(found, right, reduction="batchmean", log_target=True)
    return total
