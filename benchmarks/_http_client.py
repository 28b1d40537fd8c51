"""The clients of `http_overhead.py`, in a process of their own. Prints JSON.

_http_client.py URL MODEL TEXT REQUESTS PROMPT TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from _http_load import ask_at
from _many_worker import MOST_LETTERS

LIMIT_S = 3600.0


def main() -> None:
    """Ask for all answers at once; say how fast their tokens came."""
    url, _, text, *numbers = sys.argv[1:]
    n_requests, n_prompt, n_tokens = map(int, numbers)
    place = urlsplit(url)
    body = {"content": Path(text).read_text("utf-8", "replace")[:MOST_LETTERS]}
    tokens = httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]
    starts = np.linspace(0, len(tokens) - n_prompt - 1, n_requests, dtype=int)  # as of _many_worker.py
    requests = [(0.0, tokens[start : start + n_prompt], n_tokens) for start in starts]
    answers = ask_at(str(place.hostname), int(place.port or 0), requests, LIMIT_S)
    if not all(answer.is_whole for answer in answers):
        raise SystemExit(f"not all were answered: {[answer.status for answer in answers]}")
    wall_s = max(answer.moments[-1][0] for answer in answers) - min(answer.asked_s for answer in answers)
    n = sum(answer.tokens for answer in answers)
    print(json.dumps({"tokens": n, "wall_s": wall_s, "tokens_per_s": n / wall_s}))


if __name__ == "__main__":
    main()
