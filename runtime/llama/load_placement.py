"""Where llama.cpp is to put what it loads, where a GPU gets a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.partition.placement import Placement


@dataclass(frozen=True, slots=True)
class LoadPlacement:
    """The layers of a model that go to a GPU, and llama.cpp's handle and name of that.

    copies_weights: what lies in DRAM is copied there for passes of many tokens.
    """

    gpu_handle: int
    gpu_name: str
    layers: Placement
    copies_weights: bool
