"""Real models at the command line: the text is llama.cpp's, budgets are kept where the kernel counts, and drafts help.

What decides is what `--json` says, and a control group of exactly the budget.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_run.base.errors import BudgetError, NotSupported
from edge_run.base.units import MIB
from program import fresh_environment
from real_models import NOMIC, PROMPT, QWEN, QWEN_DRAFT, TEXTS

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

EDGEBOX = Path(__file__).resolve().parents[2] / "benchmarks" / "edgebox.py"
NO_BOX = 125
ANSWER = ["-p", PROMPT, "-n", "16", "--temp", "0", "--json", "--raw"]
KEY = ["-c", "512", "-ub", "32", "--threads", "2"]


def edge_run(
    folder: Path, *arguments: object, box: tuple[str, ...] = (), code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run the command line as if nobody had ever configured anything; it must end with `code`."""
    done = subprocess.run(
        [*box, sys.executable, "-m", "edge_run", *map(str, arguments)],
        env=fresh_environment(folder, OMP_WAIT_POLICY="passive"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if box and done.returncode == NO_BOX:
        pytest.skip(done.stderr.strip())
    assert done.returncode == code, done.stderr
    return done


def answer(folder: Path, *arguments: object, box: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a run says of its answer to the prompt."""
    found: dict[str, Any] = json.loads(edge_run(folder, *arguments, *ANSWER, *KEY, box=box).stdout)
    return found


def least_budget(folder: Path, path: Path, *arguments: object) -> int:
    """Return the smallest budget that works: a run under too small a one names it, in MiB."""
    refusal = edge_run(folder, path, "--memory", "1MiB", *arguments, *ANSWER, *KEY, code=BudgetError.exit_code).stderr
    found = re.search(r"at least (\d+) MiB", refusal)
    assert found, refusal
    return (int(found[1]) + 1) * MIB


def half_or_least(folder: Path, path: Path) -> int:
    """Return half the size of the model, or the smallest budget that works where that is more."""
    return max(path.stat().st_size // 2, least_budget(folder, path))


@pytest.mark.parametrize("path", TEXTS, ids=lambda model: model.name, indirect=True)
def test_text_is_llama_cpps_and_the_budget_is_kept(path: Path, tmp_path: Path) -> None:
    budget = half_or_least(tmp_path, path)
    wanted = answer(tmp_path, path, "--backend", "llama.cpp")
    found = answer(tmp_path, path, "--memory", budget)
    assert found["plan"]["mode"] == "streamed"
    assert found["io"]["bytes_read"] > path.stat().st_size, "more than once through the file"
    assert found["token_ids"] == wanted["token_ids"]
    assert found["text"] == wanted["text"]
    assert len(found["token_ids"]) == 16
    assert found["memory"]["peak_bytes"] <= budget
    assert wanted["numerics"] == found["numerics"]


@pytest.mark.root
@pytest.mark.parametrize("path", [QWEN], ids=lambda model: model.name, indirect=True)
def test_a_control_group_of_exactly_the_budget_is_enough(path: Path, tmp_path: Path) -> None:
    budget = half_or_least(tmp_path, path)
    box = (sys.executable, str(EDGEBOX), f"--memory={budget}", f"--cold={path}", "--")
    edge_run(tmp_path, path, "--memory", budget, *ANSWER, *KEY)  # the file is known from then on
    found = edge_run(tmp_path, path, "--memory", budget, *ANSWER, *KEY, box=box)
    figures = json.loads(found.stderr.splitlines()[-1])
    assert figures["oom_kills"] == 0
    assert figures["peak_bytes"] <= budget
    assert json.loads(found.stdout)["memory"]["peak_bytes"] <= budget


@pytest.mark.parametrize("files", [(QWEN, QWEN_DRAFT)], ids=["qwen"], indirect=True)
def test_a_draft_changes_no_token(files: list[Path], tmp_path: Path) -> None:
    """With --exact, where the width of passes makes no difference; whether guessing pays is for the run to find out."""
    path, draft = files
    budget = draft.stat().st_size + path.stat().st_size // 2 + 200 * MIB
    plain = answer(tmp_path, path, "--memory", budget, "--exact")
    drafted = answer(tmp_path, path, "--memory", budget, "--exact", "--draft", draft)
    assert drafted["plan"]["mode"] == "streamed"
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["memory"]["peak_bytes"] <= budget
    assert drafted["speculation"]["mode"] == "draft+ngram"


@pytest.mark.parametrize("path", TEXTS, ids=lambda model: model.name, indirect=True)
def test_a_json_schema_with_strings(path: Path, tmp_path: Path) -> None:
    """Inside a string all tokens are candidates: of large vocabularies that is much for a process with a limit."""
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}'
    )
    options = ("-p", "A person as JSON:", "-n", "60", "--temp", "0", *KEY, "-jf", str(schema), "--json")
    found = json.loads(edge_run(tmp_path, path, *options).stdout)
    assert isinstance(json.loads(found["text"])["name"], str)


@pytest.mark.parametrize("path", [NOMIC], ids=lambda model: model.name, indirect=True)
def test_an_encoder_is_refused_by_what_it_is(path: Path, tmp_path: Path) -> None:
    refused = edge_run(tmp_path, path, *ANSWER, code=NotSupported.exit_code)
    assert "an encoder, which makes embeddings and no text" in refused.stderr
