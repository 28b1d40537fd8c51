"""docs/package.md, which package indexes show, names every extra that can be installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_every_extra_has_a_row() -> None:
    """But that of development, which a checkout is for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / project["readme"]).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]* \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(project["optional-dependencies"].keys() - {"dev"})
