"""A bottleneck's encoder and decoder as ONNX graphs: the best linear transform, and a network beside it.

The encoder makes latents (channels, height, width) of the tensor at the cut, and the decoder makes that tensor of them.
Each is the sum of two branches. One branch is the Karhunen-Loeve transform of square patches (`find_transform`), which
is known before any training and is the best linear one. The other branch, of strided convolutions and residual blocks,
adds nothing at first. So training (BottleFit, Matsubara et al., 2022) starts at a transform code that works, which on a
CPU saves most of the time of training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError
from edge_run.base.extras import TRAIN, need

MOST_PATCH_VALUES = 4096
_QUIET = 0.2  # what a residual block adds at first, so that deep stacks begin near the identity


@dataclass(frozen=True, slots=True)
class BottleneckShape:
    """How large a bottleneck is.

    halvings: how often the encoder halves height and width of the tensor at the cut.
    latent_channels: of the code, at most.
    encoder_width: channels after the first halving, doubled by each further one.
    decoder_width: channels of the decoder at the smallest size.
    """

    halvings: int = 3
    latent_channels: int = 192
    encoder_width: int = 32
    decoder_width: int = 128

    def __post_init__(self) -> None:
        for name, least, most in (
            ("halvings", 1, 6),
            ("latent_channels", 1, 1024),
            ("encoder_width", 1, 1024),
            ("decoder_width", 1, 4096),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"bottleneck, {name.replace('_', ' ')} {value}: must be {least} to {most}")


@dataclass(slots=True)
class _Builder:
    """Collects nodes and weights; every method returns the name of the tensor it makes."""

    prefix: str
    generator: Generator
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(need("onnx", TRAIN).helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def convolve(self, value: str, sizes: tuple[int, int], kernel: int, stride: int = 1, scale: float = 1.0) -> str:
        """Add a convolution of (channels in, channels out), with weights as He et al. (2015) draw them."""
        before, after = sizes
        deviation = scale * (2 / (before * kernel * kernel)) ** 0.5
        weight = self.generator.normal(0, 1, (after, before, kernel, kernel)) * deviation
        return self.with_weights(value, weight, np.zeros(after), stride, kernel // 2)

    def with_weights(
        self, value: str, weight: NDArray[Any], bias: NDArray[Any], stride: int = 1, padding: int = 0
    ) -> str:
        """Add a convolution with these weights."""
        name = f"{self.prefix}.{len(self.nodes)}"
        for suffix, array in (("weight", weight), ("bias", bias)):
            made = need("onnx", TRAIN).numpy_helper.from_array(array.astype(np.float32), f"{name}.{suffix}")
            self.weights.append(made)
        settings = {"kernel_shape": list(weight.shape[2:]), "strides": [stride] * 2, "pads": [padding] * 4}
        return self.add("Conv", value, f"{name}.weight", f"{name}.bias", **settings)

    def block(self, value: str, channels: int) -> str:
        """Add a residual block."""
        inner = self.add("Relu", self.convolve(value, (channels, channels), 3))
        inner = self.convolve(inner, (channels, channels), 3, scale=_QUIET)
        return self.add("Relu", self.add("Add", value, inner))

    def graph(self, begin: tuple[str, list[Any]], end: tuple[str, list[Any]]) -> Any:
        """Return what was collected as an `onnx.GraphProto`; the last tensor takes the name of `end`."""
        onnx = need("onnx", TRAIN)
        self.nodes[-1].output[0] = end[0]
        made = onnx.TensorProto.FLOAT
        ends = [onnx.helper.make_tensor_value_info(name, made, ["N", *shape]) for name, shape in (begin, end)]
        return onnx.helper.make_graph(self.nodes, self.prefix, ends[:1], ends[1:], self.weights)


@dataclass(frozen=True, slots=True)
class Transform:
    """A Karhunen-Loeve transform of patches.

    basis (latent channels, channels, patch, patch): orthonormal; mean (channels, patch, patch): of a patch;
    deviations (latent channels,): of the coefficients, in descending order.
    """

    basis: NDArray[np.float32]
    mean: NDArray[np.float32]
    deviations: NDArray[np.float32]


class _Covariance:
    """The mean and the covariance of vectors that come in batches, none of which is kept."""

    def __init__(self, values: int) -> None:
        self._count, self._sum = 0, np.zeros(values)
        self._products = np.zeros((values, values))
        self._shift: NDArray[np.float32] | None = None  # about the mean, without which small differences would be lost

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Take in vectors (n, values)."""
        shift: NDArray[np.float32] = vectors.mean(0) if self._shift is None else self._shift
        self._shift = shift
        away = (vectors - shift).astype(np.float64)
        self._count += len(away)
        self._sum += away.sum(0)
        self._products += away.T @ away

    def result(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the mean (values,) and the covariance (values, values)."""
        assert self._shift is not None, "there were vectors"
        mean = self._sum / self._count
        covariance = (self._products - self._count * np.outer(mean, mean)) / max(self._count - 1, 1)
        return self._shift + mean, covariance


def check_cut(shape: BottleneckShape, cut: str, cut_shape: tuple[int, ...]) -> None:
    """Raise ConfigError where a tensor of this shape cannot be halved as often, or a patch has over 4096 values."""
    channels, height, width = _image_shape(cut, cut_shape)
    patch = 1 << shape.halvings
    if height % patch or width % patch:
        raise ConfigError(
            f"cut {cut}: {height} x {width} cannot be halved {shape.halvings} times; fewer --halvings, or another cut"
        )
    values = channels * patch * patch
    if values > MOST_PATCH_VALUES:
        raise ConfigError(
            f"cut {cut}: {shape.halvings} halvings of {channels} channels make patches of {values:,} values; at most "
            f"{MOST_PATCH_VALUES:,} can be transformed: fewer --halvings, or an earlier cut"
        )


def find_transform(
    shape: BottleneckShape, cut: str, cut_shape: tuple[int, ...], batches: Iterable[NDArray[np.float32]]
) -> Transform:
    """Return the transform of tensors of `cut_shape` that come in batches, one of which is held at a time.

    Raises ConfigError as `check_cut`.
    """
    check_cut(shape, cut, cut_shape)
    channels, height, width = _image_shape(cut, cut_shape)
    patch = 1 << shape.halvings
    covariance = _Covariance(channels * patch * patch)
    for batch in batches:
        grid = batch.reshape(len(batch), channels, height // patch, patch, width // patch, patch)
        covariance.add(grid.transpose(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch * patch))
    mean, spread = covariance.result()
    power, vectors = np.linalg.eigh(spread)
    order = np.argsort(power)[::-1][: shape.latent_channels]
    basis = vectors[:, order].T.reshape(len(order), channels, patch, patch)
    deviations = np.sqrt(np.maximum(power[order], 1e-12))
    return Transform(*(one.astype(np.float32) for one in (basis, mean.reshape(channels, patch, patch), deviations)))


def blank_transform(shape: BottleneckShape, cut: str, cut_shape: tuple[int, ...]) -> Transform:
    """Return a transform of the shape that `find_transform` returns, which keeps nothing of a patch."""
    channels, _, _ = _image_shape(cut, cut_shape)
    patch = 1 << shape.halvings
    mean = np.zeros((channels, patch, patch), dtype=np.float32)
    kept = min(shape.latent_channels, mean.size)
    return Transform(np.zeros((kept, *mean.shape), dtype=np.float32), mean, np.zeros(kept, dtype=np.float32))


def make_encoder(
    shape: BottleneckShape, cut: str, cut_shape: tuple[int, ...], latent: str, transform: Transform
) -> Any:
    """Return the encoder: an `onnx.GraphProto` from tensor `cut` to tensor `latent`."""
    channels, height, width = _image_shape(cut, cut_shape)
    kept, _, patch, _ = transform.basis.shape
    builder = _Builder("edge_run.encoder", default_rng(0))
    bias = -(transform.basis * transform.mean).sum((1, 2, 3))
    linear = builder.with_weights(cut, transform.basis, bias, stride=patch)
    value, wide = cut, channels
    for stage in range(shape.halvings):
        wider = shape.encoder_width << stage
        value = builder.add("Relu", builder.convolve(value, (wide, wider), 3, stride=2))
        value, wide = builder.block(value, wider), wider
    builder.add("Add", builder.convolve(value, (wide, kept), 1, scale=0.0), linear)
    return builder.graph((cut, [channels, height, width]), (latent, [kept, height // patch, width // patch]))


def make_decoder(
    shape: BottleneckShape, latent: str, cut: str, cut_shape: tuple[int, ...], transform: Transform
) -> Any:
    """Return the decoder: an `onnx.GraphProto` from tensor `latent` to tensor `cut`."""
    channels, height, width = _image_shape(cut, cut_shape)
    kept, _, patch, _ = transform.basis.shape
    builder = _Builder("edge_run.decoder", default_rng(1))
    inverse = transform.basis.reshape(kept, -1).T[:, :, None, None]
    linear = builder.with_weights(latent, inverse, transform.mean.reshape(-1))
    linear = builder.add("DepthToSpace", linear, blocksize=patch, mode="CRD")
    wide = shape.decoder_width
    value = builder.add("Relu", builder.convolve(latent, (kept, wide), 1))
    value = builder.block(value, wide)
    for _ in range(shape.halvings):
        narrow = max(wide // 2, 16)
        value = builder.convolve(value, (wide, 4 * narrow), 1)
        value = builder.add("Relu", builder.add("DepthToSpace", value, blocksize=2, mode="CRD"))
        value, wide = builder.block(value, narrow), narrow
    builder.add("Add", builder.convolve(value, (wide, channels), 3, scale=0.0), linear)
    return builder.graph((latent, [kept, height // patch, width // patch]), (cut, [channels, height, width]))


def _image_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 4 or shape[0] != 1:  # of a batch of one
        written = " x ".join(map(str, shape))
        raise ConfigError(
            f"{name}: has the shape {written}; a bottleneck needs (batch, channels, height, width), with a batch of 1"
        )
    return shape[1], shape[2], shape[3]
