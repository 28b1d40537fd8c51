"""What the tests of streaming share: an address space, the weights in it, and nodes that read them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_run.tiers.address_space import AddressSpace
from held_weights import CHUNK, N_CHUNKS, Nodes, Weights
from mapped import mapped


@pytest.fixture
def address_space() -> Iterator[AddressSpace]:
    with mapped([N_CHUNKS * CHUNK], CHUNK) as area:
        yield area


@pytest.fixture
def weights() -> Weights:
    return Weights()


@pytest.fixture
def nodes(address_space: AddressSpace) -> Nodes:
    return Nodes(address_space)
