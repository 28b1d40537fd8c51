"""A filter on the device that finds frames without anything of interest, for which nothing is sent.

The filter is a logistic regression on the means of the encoder's last features (after Matsubara et al., Neural
Compression and Filtering, 2021, whose filter is a small network). Its threshold follows from how many it may miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.errors import ConfigError
from edge_run.base.extras import TRAIN, need
from edge_run.runtime.split.bundle import StoredFilter
from edge_run.runtime.split.networks import INTEREST

_ROUNDS, _STEP, _DECAY = 2000, 0.5, 1e-4
_LEAST = 1e-6  # a threshold is never 0: everything would be sent, which no filter does as well


@dataclass(frozen=True, slots=True)
class FittedFilter:
    """Weights (features,) and bias of the regression, and what was measured."""

    weights: NDArray[np.float32]
    bias: float
    stored: StoredFilter


def fit_filter(
    known: tuple[NDArray[Any], NDArray[Any]], held_out: tuple[NDArray[Any], NDArray[Any]], most_missed: float
) -> FittedFilter:
    """Return a filter fitted on `known` (features, is of interest).

    At most `most_missed` of what is of interest among `known` lies below the threshold; what it misses and drops is
    measured on `held_out`. Raises ConfigError where one kind of images is missing.
    """
    features, labels = known
    if labels.all() or not labels.any():
        raise ConfigError("--empty: a filter needs images of both kinds, of interest and not; there are too few")
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    weights, bias = _regress((features - mean) / deviation, labels)
    weights, bias = weights / deviation, bias - float((weights * mean / deviation).sum())
    threshold = max(float(np.quantile(_logistic(features[labels] @ weights + bias), most_missed)), _LEAST)
    below, wanted = _logistic(held_out[0] @ weights + bias) < threshold, held_out[1]
    counts = (int(wanted.sum()), int((below & wanted).sum()), int((~wanted).sum()), int((below & ~wanted).sum()))
    return FittedFilter(weights.astype(np.float32), bias, StoredFilter(threshold, *counts))


def add_filter(encoder: Any, hidden: str, fitted: FittedFilter) -> None:
    """Give the graph `encoder` a second output from features `hidden`: how likely a frame is of interest."""
    onnx = need("onnx", TRAIN)
    make = onnx.helper.make_node
    encoder.node.extend(
        [
            make("GlobalAveragePool", [hidden], ["edge_run.filter.mean"]),
            make("Flatten", ["edge_run.filter.mean"], ["edge_run.filter.features"]),
            make(
                "Gemm",
                ["edge_run.filter.features", "edge_run.filter.weight", "edge_run.filter.bias"],
                ["edge_run.filter.sum"],
            ),
            make("Sigmoid", ["edge_run.filter.sum"], [INTEREST]),
        ]
    )
    arrays = {"weight": fitted.weights[:, None], "bias": np.array([fitted.bias], dtype=np.float32)}
    encoder.initializer.extend(
        onnx.numpy_helper.from_array(array, f"edge_run.filter.{name}") for name, array in arrays.items()
    )
    encoder.output.append(onnx.helper.make_tensor_value_info(INTEREST, onnx.TensorProto.FLOAT, ["N", 1]))


def _regress(features: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """Return weights and bias by gradient descent; both kinds of images count the same altogether."""
    share = np.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum())
    weights, bias = np.zeros(features.shape[1]), 0.0
    for _ in range(_ROUNDS):
        error = (_logistic(features @ weights + bias) - labels) * share
        weights -= _STEP * (features.T @ error + _DECAY * weights)
        bias -= _STEP * float(error.sum())
    return weights, bias


def _logistic(values: NDArray[Any]) -> NDArray[Any]:
    return 1 / (1 + np.exp(-np.clip(values, -50, 50)))
