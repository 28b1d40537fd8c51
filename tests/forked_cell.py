"""What a cell leaves out of Jinja as it imports its jobs: those of tests are forks of a process that did so too."""

from __future__ import annotations

from edge_run.runtime.processes.child_process import skip_package_code

skip_package_code("jinja2")
