"""Lines of a batch, as OpenAI's Batch API has them."""

from __future__ import annotations

import json
from pathlib import Path

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def write(path: Path, *lines: object) -> Path:
    """Write lines, those that are no text as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path
