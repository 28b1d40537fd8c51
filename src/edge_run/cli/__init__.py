"""The command line. Here are its entry and its commands; what they do is the library's business.

Only this package reads settings from the environment and the configuration file (`cli/shared/settings.py`). llama.cpp
and NumPy are imported when a model is opened, so that `edge-run --help` is quick.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `args`, by default this process's, and exit with its code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends an import at once, without a traceback
    from edge_run.cli.app import main as run

    signal.signal(signal.SIGINT, before)
    run(args)
