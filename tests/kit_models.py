"""The bundled model, and the options under which its grown copy (the fixture `grown`) streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_run.base.units import MIB

KIT = Path(__file__).resolve().parents[1] / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
STREAMED: dict[str, Any] = {"memory": 160 * MIB, "context_tokens": 256, "micro_batch_tokens": 16, "threads": 1}
