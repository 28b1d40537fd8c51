"""Prints what tests need, a line each, without what checks sources, and what has no wheel for arm64.

`requirements.py NAME` prints the requirement of that one package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
LEFT_OUT = {"edge-run", "llama-cpp-python", "constriction"}  # from sources, but the last, which has no wheel
CHECKERS = {"ruff", "mypy", "pyright", "pre-commit", "import-linter", "types-psutil"}
OF_LLAMA_CPP_PYTHON = ["typing-extensions", "diskcache", "pip"]  # and what installs edge-run


def requirements() -> Iterator[tuple[str, str]]:
    """Yield the name and the requirement of each package that is wanted, of the product and of its tests."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for wanted in [*project["dependencies"], *(one for name in extras for one in extras[name])]:
        name = re.split(r"[^\w-]", wanted, maxsplit=1)[0]
        if name not in CHECKERS and name != "torch":
            yield name, wanted


def main() -> None:
    """Print them."""
    found = list(requirements())
    if len(sys.argv) > 1:
        print(next(wanted for name, wanted in found if name == sys.argv[1]))
    else:
        print("\n".join(sorted({wanted for name, wanted in found if name not in LEFT_OUT} | set(OF_LLAMA_CPP_PYTHON))))


if __name__ == "__main__":
    main()
