"""What tests ask of a model that is opened for two answers at once: the fixture `model_of_two`."""

from __future__ import annotations

from typing import Any

PROMPT = "Once upon a time there was"
OPTIONS: dict[str, Any] = {"context_tokens": 512, "threads": 1}
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
