"""How much the answers of a network depend on each channel of a code, so that those that matter are rounded finer.

For an error that is small against what the network notices, the best steps of rounding are inversely proportional to
the root of a channel's Fisher information: the mean square of the gradient of the logarithm of an answer's probability,
the answer drawn as the network itself would answer. No labels are needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_run.base.extras import need
from edge_run.runtime.onnx_torch import TorchGraph

EXTRA = "train"
MOST_IMAGES, BATCH = 512, 64
MOST_RATIO = 16.0  # between a channel's weight and their mean, either way: few images say little of rare channels


def find_weights(decoder: TorchGraph, rest: TorchGraph, latents: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Return a weight for each channel of `latents` (n, channels, height, width), with a mean of about 1."""
    torch = need("torch", EXTRA)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(latents.shape[1], dtype=torch.float64)
    for start in range(0, min(len(latents), MOST_IMAGES), BATCH):
        batch = torch.from_numpy(latents[start : start + BATCH]).clone().requires_grad_(True)
        answers = rest(*decoder(batch))
        score = sum(_score(one.float(), generator) for one in answers)
        (gradient,) = torch.autograd.grad(score, batch)
        total += (gradient.double() ** 2).sum((0, 2, 3))
    root = np.sqrt(total.numpy())
    return np.clip(root / max(root.mean(), 1e-12), 1 / MOST_RATIO, MOST_RATIO).astype(np.float32)


def _score(answer: Any, generator: Any) -> Any:
    """Return the log-probability of answers drawn for a batch; of what is no class, a sum with arbitrary signs."""
    torch = need("torch", EXTRA)
    if answer.dim() != 2 or answer.shape[1] < 2:
        signs = torch.randint(0, 2, answer.shape, generator=generator) * 2.0 - 1
        return (answer * signs).sum()
    with torch.no_grad():
        is_share = bool((answer >= 0).all()) and bool(((answer.sum(1) - 1).abs() < 1e-3).all())
        shares = answer.clamp_min(1e-12) if is_share else torch.softmax(answer, 1)
        drawn = torch.multinomial(shares, 1, generator=generator)
    logarithms = answer.clamp_min(1e-12).log() if is_share else torch.log_softmax(answer, 1)
    return logarithms.gather(1, drawn).sum()
