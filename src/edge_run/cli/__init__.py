"""The command line. Here are its entry and its commands; what they do is the library's business.

Only this package reads settings from the environment and the configuration file (`cli/shared/settings.py`). llama.cpp
and NumPy are imported when a model is opened, so that `edge-run --help` is quick.
"""

from edge_run.cli.app import main

__all__ = ["main"]
