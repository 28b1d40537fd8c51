"""Everything of ours that reads what somebody else may have written, each with valid input of our own writers.

`benchmarks/fuzz_parsers.py` tries 100,000 inputs each, `tests/property/test_hostile_input.py` a few.
"""

from __future__ import annotations

import targets_fetched
import targets_files
import targets_members
import targets_mesh
import targets_runs
import targets_split
from hostile_target import MAKERS, Target, outcome

__all__ = ["MAKERS", "Target", "outcome"]
__all__ += ["targets_fetched", "targets_files", "targets_members", "targets_mesh", "targets_runs", "targets_split"]
