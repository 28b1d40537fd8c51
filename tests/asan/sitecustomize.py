"""For processes under AddressSanitizer (`make test-asan`), whose shadow of all memory counts as data: 20 TB of it.

So no limit of data or of addresses is set there, which children of ours set for themselves. Not for other tests.
"""

from __future__ import annotations

import resource

_set = resource.setrlimit


def _set_others(kind: int, limits: tuple[int, int]) -> None:
    if kind not in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _set(kind, limits)


resource.setrlimit = _set_others
