"""What others are shown of the work of a worker: `edge-run mesh status` and Home Assistant show it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge_run.base.errors import EdgeRunError
from edge_run.base.fields import Document
from edge_run.base.protocols import Clock

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class WorkReport:
    """The model that is computed with, and how fast, once a second. For one thread.

    A token counts in the pass that its logits come from, whichever device makes them.
    """

    def __init__(self, report: Callable[[Document], None], clock: Clock = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._said: Document = {}
        self._said_s, self._tokens = clock(), 0

    def count(self, n_tokens: int) -> None:
        """A pass for `n_tokens` tokens is done."""
        self._tokens += n_tokens

    def tell(self, model: str) -> None:
        """Say what is new, where it is time: `model` is computed with, an empty one is none."""
        now_s = self._clock()
        took_s = now_s - self._said_s
        is_other = model != self._said.get("model", "")
        if took_s < EVERY_S and not is_other:
            return
        rate = 0.0 if is_other else self._tokens / took_s
        self._said_s, self._tokens = now_s, 0
        new: Document = {"model": model, "tokens_per_s": round(rate, 2)} if model else {}
        if new != self._said:
            self._said = new
            try:
                self._report(new)
            except EdgeRunError as error:
                logger.info("%s", error)
