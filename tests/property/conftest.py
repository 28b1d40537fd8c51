"""What the property tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest


@pytest.fixture
def outcomes() -> Iterator[Counter[str]]:
    """What became of each example of a test, which counts that: some are to be taken, and some refused."""
    found: Counter[str] = Counter()
    yield found
    assert 50 * min(found["taken"], found["refused"]) > found.total(), found
