"""The real, trained models that `make test-real` and `benchmarks/real.py` run: names, hashes, and what they are.

None of them is in the repository, and where they come from is not its business: `EDGE_RUN_REAL_MODELS` names the folder
that they lie in. A file of another hash is another model, whatever its name.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "EDGE_RUN_REAL_MODELS"


@dataclass(frozen=True, slots=True)
class RealModel:
    """A file as it was published. is_text: it generates text."""

    name: str
    sha256: str
    what: str
    is_text: bool = True

    @property
    def file_name(self) -> str:
        """What the file is called."""
        return f"{self.name}.gguf"


SMOLLM2 = RealModel(
    "smollm2-135m",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "SmolLM2-135M-Instruct, Q4_1",
)
GEMMA3 = RealModel(
    "gemma3-270m",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "gemma-3-270m, Q4_K_M, sliding windows",
)
TINYLLAMA = RealModel(
    "tinyllama-1.1b",
    "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    "TinyLlama-1.1B-Chat, IQ2_XXS",
)
QWEN_DRAFT = RealModel(
    "qwen-0.5b",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
)
QWEN = RealModel(
    "qwen-1.5b",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
)
NOMIC = RealModel(
    "nomic-embed",
    "f7af6f66802f4df86eda10fe9bbcfc75c39562bed48ef6ace719a251cf1c2fdb",
    "nomic-embed-text-v1.5, F16, an encoder",
    is_text=False,
)
MODELS = (SMOLLM2, GEMMA3, TINYLLAMA, QWEN_DRAFT, QWEN, NOMIC)
TEXTS = tuple(model for model in MODELS if model.is_text)

PROMPT = (
    "The keeper of the lighthouse wrote down every ship that passed, with its name, the hour and the weather. In the "
    "winter of that year the storms were so long that whole pages of his book stayed empty, and when the supply boat "
    "came at last, its captain asked him what he had done all the time. He answered that"
)  # some 65 tokens


class Missing(Exception):
    """A model is not there; the message says why."""


class WrongFile(Exception):
    """A file is there that is not the model of its name."""


def find(model: RealModel) -> Path:
    """Return the file of `model`. Raises Missing, and WrongFile for one of another hash."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise Missing(f"{VARIABLE} names no folder of real models (CONTRIBUTING.md, Real models)")
    path = Path(folder, model.file_name)
    if not path.is_file():
        raise Missing(f"{path}: not there ({model.what})")
    status = path.stat()
    if (found := _digest(path, status.st_size, status.st_mtime_ns)) != model.sha256:
        raise WrongFile(f"{path}: its SHA-256 is {found}, that of {model.what} is {model.sha256}")
    return path


@functools.cache
def _digest(path: Path, _size_bytes: int, _modified_ns: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
