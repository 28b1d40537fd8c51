"""What others wrote, as JSON of bounded length."""

from __future__ import annotations

import json
from typing import Any

from edge_run.base.errors import ConfigError

MOST_SCHEMA_LETTERS = 1 << 16


def bounded_json(schema: dict[str, Any], what: str, most_letters: int = MOST_SCHEMA_LETTERS) -> str:
    """Return a JSON object as text. Raises ConfigError for a long one, called `what`, and for what JSON cannot say."""
    try:
        text = "" if _is_longer(schema, most_letters) else json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: must be what JSON can say ({error})") from error
    if not 0 < len(text) <= most_letters:
        raise ConfigError(f"{what}: more than {most_letters:,} letters as JSON")
    return text


def _is_longer(value: Any, most_letters: int) -> bool:
    """Return whether a value has more letters as JSON than that for certain: writing it all could take a second."""
    rest, n_letters = [value], 0
    while rest and n_letters <= most_letters:
        one = rest.pop()
        n_letters += len(one) if isinstance(one, str | list | dict) else 1
        if isinstance(one, list | dict):
            rest += one if isinstance(one, list) else [*one, *one.values()]
    return n_letters > most_letters
