"""Packages that only an extra installs: imported where they are used, refused in one line where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from edge_run.base.errors import NotSupported

CLUSTER, MESH, PACK, SERVE, SPLIT, TRAIN = "cluster", "mesh", "pack", "serve", "split", "train"


def need(module: str, extra: str) -> Any:
    """Return the module of this name. Raises NotSupported, naming the extra that installs it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise NotSupported(
            f"{package}: needed here and not installed ({error}); pip install 'edge-run[{extra}]', or in a checkout "
            f"pip install -e '.[{extra}]'"
        ) from error
