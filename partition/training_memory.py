"""How a training fits into a budget: how much of a batch is computed at once, and how much is kept of its images."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.errors import BudgetError
from edge_run.base.units import format_size

LEAST_IMAGES = 2  # that a training computes at once: fewer would not show whether a network takes batches
COPIES_OF_TENSORS = 2  # of what a layer makes: itself, and its gradient or what it is in another format
COPIES_OF_WEIGHTS = 8  # as they were, learning, gradients, Adam's two means, and what is opened, measured and written
COPIES_OF_COVARIANCE = 6  # of patches at the cut: summed, centred, and its vectors found
COPIES_OF_LATENTS = 6  # scaled, rounded, clipped and counted


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """What a training takes, in bytes.

    fixed: whatever is computed at once.
    image: for each image that is computed at once.
    latents: of one image.
    sample: most that is kept of latents, if there is room.
    kept: most that is kept of decoded images, if there is room.
    """

    fixed: int
    image: int
    latents: int
    sample: int
    kept: int


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """What a training may do within its budget.

    at_once: images that are computed at once; gradients of the parts of a batch are added up.
    sample_bytes: of latents that are held to count them.
    kept_bytes: of decoded images.
    needed_bytes: of all that.
    """

    at_once: int
    sample_bytes: int
    kept_bytes: int
    needed_bytes: int


def plan_training(name: str, budget_bytes: int, batch: int, sizes: TrainingSizes) -> TrainingMemory:
    """Return what fits: first the whole batch, then decoded images; latents take turns with the batch.

    Raises BudgetError, with the smallest budget that works for the network `name`.
    """
    least = sizes.fixed + max(min(LEAST_IMAGES, batch) * sizes.image, COPIES_OF_LATENTS * sizes.latents)
    if budget_bytes < least:
        raise BudgetError(
            f"{name}: training takes {format_size(least)} at least, the budget is {format_size(budget_bytes)}; raise "
            "--memory, or export the network for smaller images",
            needed_bytes=least,
            found_bytes=budget_bytes,
            minimum_bytes=least,
        )
    left = budget_bytes - sizes.fixed
    at_once = min(batch, left // sizes.image)
    kept = min(sizes.kept, left - max(at_once * sizes.image, COPIES_OF_LATENTS * sizes.latents))
    sample = min(sizes.sample, (left - kept) // COPIES_OF_LATENTS)
    needed = sizes.fixed + kept + max(at_once * sizes.image, COPIES_OF_LATENTS * sample)
    return TrainingMemory(at_once, sample, kept, needed)
