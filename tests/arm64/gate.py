"""The exactness gate in short, for an emulator: few models, few tokens, one process that forks for each comparison.

    gate.py RECORDS

Streamed weights are compared with llama.cpp's plain kernels (`exactness.py`), repacked ones with those of its default
(`repacked.py`), which are made for the processor's instructions. Each comparison is a line of JSON in RECORDS; one that
was equal before is not made again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import exactness
import repacked
from tiny_models import make_model

SHORT = ("--prefill", "70", "--decode", "4")
PLAIN, REPACKED = "exactness", "repacked"
COMPARISONS: tuple[tuple[str, str, str | None, tuple[str, ...]], ...] = (
    (REPACKED, "llama", "Q4_0", ("--streamed",)),
    (REPACKED, "llama", "Q4_K_M", ("--streamed",)),
    (PLAIN, "llama", "Q4_K_M", ()),
    (REPACKED, "llama", "Q8_0", ("--streamed",)),
    (PLAIN, "llama", None, ()),
    (PLAIN, "qwen3moe", None, ("--by-expert",)),
    (REPACKED, "qwen3moe", "Q4_0", ("--streamed", "--by-expert")),
    (REPACKED, "llama", "Q4_0", ()),
    (PLAIN, "mamba", None, ()),
    (PLAIN, "gemma3", None, ()),
    (PLAIN, "deepseek2", None, ("--by-expert",)),
    (PLAIN, "qwen3", None, ("--kv-type", "q8_0")),
    (REPACKED, "llama", "IQ4_NL", ("--streamed",)),
    (PLAIN, "llama", "Q8_0", ()),
    (PLAIN, "rwkv7", None, ()),
    (PLAIN, "gpt-oss", None, ("--by-expert",)),
)


def compared(kind: str, path: Path, folder: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Make one comparison in a fork, and return what it printed, or why it printed nothing."""
    file = folder / "printed"
    if (child := os.fork()) == 0:
        printed = io.StringIO()
        try:
            sys.argv = [kind, str(path), *([str(folder)] if kind == REPACKED else []), *SHORT, *arguments]
            with contextlib.redirect_stdout(printed):
                (repacked if kind == REPACKED else exactness).main()
        except BaseException:
            printed = io.StringIO(json.dumps({"error": traceback.format_exc()}))
        file.write_text(printed.getvalue(), encoding="utf-8")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return {"error": f"ended with {status}"}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    return found


def main() -> None:
    """Make all comparisons that are left."""
    records = Path(sys.argv[1])
    known = map(json.loads, records.read_text(encoding="utf-8").splitlines()) if records.exists() else ()
    done = {line["what"] for line in known if line["is_equal"]}
    for kind, name, quantisation, arguments in COMPARISONS:
        what = " ".join((kind, name, quantisation or "F16", *arguments))
        if what in done:
            continue
        began_s = time.time()
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(name, Path(folder), quantisation=quantisation, scale=4 if quantisation == "Q4_K_M" else 1)
            found = compared(kind, path, Path(folder), arguments)
        runs = found.get("runs", [])
        is_equal = bool(runs) and all(run["different_rows"] == 0 for run in runs)
        line = {"what": what, "is_equal": is_equal, "seconds": round(time.time() - began_s), "found": found}
        with records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{what}: {'equal' if is_equal else found}", flush=True)


if __name__ == "__main__":
    main()
