"""Where the C library moves no page frames: all that does not need it works, and says what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from program import WAIT_S, Result

TESTS = Path(__file__).resolve().parents[1]
WHY = "does not move page frames (mremap); Linux 5.7 or later does"


@pytest.fixture(params=["macos", "windows"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Result]:
    """Run Python on what is like that system, child processes included."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import other_system; other_system.pretend({request.param!r})"
    )

    def run(*words: object) -> Result:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path),
        }
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)

    return run


def test_it_is_imported(run: Callable[..., Result]) -> None:
    """All that is public: what `edge_run` names is loaded when it is first asked for; and what a batch writes with."""
    public = "import edge_run; [getattr(edge_run, name) for name in edge_run.__all__]"
    done = run("-c", f"{public}; import edge_run.runtime.batches.results_file; print('all of it')")
    assert (done.stdout, done.stderr) == ("all of it\n", "")


def test_llama_cpp_runs_a_model_and_it_is_said_why(run: Callable[..., Result], kit: Path) -> None:
    words = ("-m", "edge_run", kit, "-p", "Once", "-n", "5", "--temp", "0", "-t", "1", "-c", "256")
    asked, found, ours = run(*words, "--backend", "llama.cpp"), run(*words), run(*words, "--backend", "edge-run")
    assert (asked.returncode, found.returncode) == (0, 0), asked.stderr + found.stderr
    assert asked.stdout == found.stdout != ""
    assert WHY in found.stderr
    assert ours.returncode == 7
    assert WHY in ours.stderr
    assert ours.stderr.count("\n") == 1


def test_a_plan_says_that_there_is_nothing_to_plan(run: Callable[..., Result], kit: Path) -> None:
    done = run("-m", "edge_run", "plan", kit, "-c", "256")
    assert (done.returncode, done.stderr) == (0, "")
    assert WHY in done.stdout
    as_json = run("-m", "edge_run", "plan", kit, "-c", "256", "--json")
    assert as_json.returncode == 7
    assert WHY in as_json.stderr


def test_the_doctor_looks_at_everything_and_names_it(run: Callable[..., Result], kit: Path) -> None:
    done = run("-m", "edge_run", "doctor", kit)
    assert WHY in done.stdout, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "mistake" not in done.stdout + done.stderr
    assert "llama.cpp" in done.stdout
