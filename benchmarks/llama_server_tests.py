"""llama-server's own Python tests, those of endpoints that `edge-run serve` has too, against both servers.

    python benchmarks/llama_server_tests.py FOLDER --text MODEL --encoder MODEL --peer LLAMA-SERVER [--draft MODEL]

FOLDER is `tools/server/tests` of llama.cpp, with `models/templates` where the tests look for it. Their models, which
they would download, are replaced by those that are named: what a test says of a certain model's words or tokens then
fails with llama-server too, and is counted apart. Needs requests, openai and filelock. Where a file of tests does not
come to its end, nothing is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _box import ROOT, write_results

FILES = ("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift", "embedding",
         "ignore_eos", "metrics", "security", "speculative", "template", "tokenize", "tool_call")  # fmt: skip
SHIM = ROOT / "benchmarks" / "_llama_server_shim.py"
MOST_S = 100
ENDED = (0, 1, 5)  # what pytest ends with: all passed, some failed, nothing was left to try
BOTH, OURS, THEIRS, NEITHER, SKIPPED = "both pass", "edge-run alone", "llama-server alone", "neither", "skipped"
NEEDED = ("requests", "openai", "filelock", "pytest_timeout")
KINDS = {("passed", "passed"): BOTH, ("passed", "failed"): OURS, ("failed", "passed"): THEIRS}
_SHARED = "answers share the whole context: it is not divided among them"
_EMPTY = "the first chunk's content is an empty text, as OpenAI has it, not null"
_NAMED = "`--chat-template` is Jinja, or a file of it; names of llama.cpp's own templates are not known"
_VERBOSE = "no `__verbose`: `/apply-template` says what the prompt is"
_METRICS = "figures have vLLM's names, and the model's in a label, not `llamacpp:`"
_FORMS = "a text is a string or a list of tokens, as OpenAI has it; not both in one list, and no object"
_ORIGINS = "pages of other sites are refused unless `--allow-origin` names theirs"
REASONS: Mapping[str, str] = {
    "basic: server_multiple_addresses": "`--host` is one address",
    "basic: server_props": _SHARED,
    "basic: server_slots": "`/slots` is always there, as it says nothing of what is asked; " + _SHARED,
    "basic: server_model_aliases": "a model has one name, that of its file",
    "chat_completion: chat_completion[None-Book-What is the best book-8-^ blue": _NAMED,
    "chat_completion: chat_completion_stream": _EMPTY,
    "chat_completion: chat_completion_with_timings_per_token": _EMPTY,
    "chat_completion: logprobs_stream": _EMPTY,
    "chat_completion: chat_template_assistant_prefill": _VERBOSE,
    "chat_completion: chat_template_continue_final_message_vllm": _VERBOSE,
    "chat_completion: chat_template_continue_final_message_mutual": _NAMED,
    "chat_completion: chat_template": _NAMED,
    "chat_completion: apply_chat_template": _NAMED,
    "chat_completion: verbose_debug": _VERBOSE,
    "chat_completion: context_size_exceeded": _SHARED,
    "chat_completion: invalid_chat_completion_req": "two answers in a row are a conversation too",
    "compat_anthropic: anthropic_empty_messages": "a conversation without a message is refused",
    "compat_anthropic: anthropic_tool_result_with_image": "a picture that a tool gave is left out, which is said there",
    "compat_anthropic: anthropic_vision_format": "a picture is refused with status 400, not 500",
    "compat_oai_responses: responses_stream_with_llama_telemetry": "neither progress nor times",
    "completion: completion_unified": "`-n` is the most that an answer may have, whatever its request says",
    "completion: n_probs_post": "no probabilities after sampling (`post_sampling_probs`): it is refused",
    "completion: logit_bias": "biases are of tokens, not of texts",
    "completion: nocache_long": _SHARED,
    "ctx_shift: ctx_shift_disabled": _SHARED,
    "embedding: embedding_mixed_input": _FORMS,
    "embedding: embedding_content_text": _FORMS,
    "embedding: embedding_error_prompt_too_long": "the refusal has other words",
    "ignore_eos: ignore_eos": "`generation_settings` do not repeat the biases",
    "metrics: metrics_disabled": "what is not there has status 404, not 501",
    "metrics: metrics_timings_are_finite": "`timings` also say why the answer ended (`finish_reason`), which is a word",
    "metrics: metrics_timings_on_prompt_progress": "pieces have no `timings`, the end of a stream has them",
    "metrics: metrics_": _METRICS,
    "security: access_static_assets": "the page is another one, with other files",
    "security: cors_proxy": "there is no proxy",
    "security: cors": _ORIGINS,
    "template: date_inside_prompt": "a template is not told of `functions`, which this one wants besides `tools`",
    "template: reasoning": "a template is told to think by a request alone (`chat_template_kwargs`)",
    "template: add_generation_prompt": "a prompt ends where the answer begins: `add_generation_prompt` is not known",
    "tool_call: completion_without_tool_call_fast": _EMPTY,
    "speculative: ": "`timings` do not count guesses (`/metrics` does), and none are made up (`--spec-synth-rates`)",
}


def main() -> None:
    """Run the tests against both servers; write down what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a small model that generates text")
    parser.add_argument("--encoder", type=Path, help="a model that makes embeddings")
    parser.add_argument("--draft", type=Path, help="a draft model of the first")
    parser.add_argument("--peer", type=Path, required=True, help="llama-server")
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--outcomes", type=Path, help="a folder where outcomes are kept: a run that was ended goes on")
    parser.add_argument("--jobs", type=int, default=2, help="files of tests at once")
    given = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    if not (given.folder / "unit").is_dir():
        parser.error(f"{given.folder}: not `tools/server/tests` of llama.cpp")
    with tempfile.TemporaryDirectory() as folder:
        place = given.outcomes or Path(folder)
        place.mkdir(exist_ok=True)
        ours = place.resolve() / "edge-run"
        ours.write_text(f'#!/bin/sh\nexec {sys.executable} {SHIM} "$@"\n')
        ours.chmod(0o755)
        sides = (("ours", ours), ("peer", given.peer))
        with ThreadPoolExecutor(given.jobs) as pool:
            runs = [
                pool.submit(run, name, server, given, place.resolve() / f"{name}.{side}")
                for name, (side, server) in itertools.product(given.files, sides)
            ]
            for one in runs:
                one.result()
        rows = [row for name in given.files for row in compared(place / f"{name}.ours", place / f"{name}.peer")]
    write_results("llama-server-tests", rows, f"{(__doc__ or '').strip()}\n\n{table(rows)}")


def run(name: str, server: Path, given: argparse.Namespace, found: Path) -> None:
    """Run those of a file of tests against a server that are not in `found`; leave there how each ended."""
    tests = given.folder.resolve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = {"TEXT": given.text, "ENCODER": given.encoder, "DRAFT": given.draft}
    found.touch()
    environment = {
        **os.environ,
        **{f"TESTS_{key}": str(path.resolve()) for key, path in named.items() if path},
        "TESTS_FOUND": str(found),
        "LLAMA_SERVER_BIN_PATH": str(server.resolve()),
        "PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(tests), str(SHIM.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "_llama_server_plugin", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", "-W", "ignore", f"--timeout={MOST_S}", f"unit/test_{name}.py"]
    code = subprocess.run(command, cwd=tests, env=environment, check=False, stdout=sys.stderr).returncode
    if code not in ENDED:
        raise SystemExit(f"{name}: pytest ended with {code}, and not all was tried: --outcomes FOLDER goes on")


def compared(ours: Path, peer: Path) -> list[dict[str, str]]:
    """Return a row for each test of a file: how it ended with both servers, and why."""
    one, other = (
        {line["test"]: line for line in map(json.loads, side.read_text().splitlines())} for side in (ours, peer)
    )
    rows = []
    for test in dict.fromkeys((*one, *other)):
        ends = [side.get(test, {"outcome": "skipped", "reason": "it did not run"}) for side in (one, other)]
        outcomes = (ends[0]["outcome"], ends[1]["outcome"])
        kind = SKIPPED if "skipped" in outcomes else KINDS.get(outcomes, NEITHER)
        name = test.removeprefix("unit/test_").replace(".py::test_", ": ")
        said = {
            side: " ".join(end["reason"].split())[:200]
            for side, end in zip(("edge_run", "llama_server"), ends, strict=True)
        }
        rows.append({"test": name, "kind": kind, "why": why(name) if kind == THEIRS else "", **said})
    return rows


def why(test: str) -> str:
    """Return why edge-run differs; empty where nobody knows."""
    return next((reason for start, reason in REASONS.items() if test.startswith(start)), "")


def table(rows: list[dict[str, str]]) -> str:
    """Return how many of each file pass, and each test that llama-server alone passes, with the reason."""
    kinds = (BOTH, OURS, THEIRS, NEITHER, SKIPPED)
    lines = [f"| file | {' | '.join(kinds)} |", "|---|---|---|---|---|---|"]
    files = dict.fromkeys(row["test"].partition(":")[0] for row in rows)
    for file in (*files, "all"):
        counted = Counter(row["kind"] for row in rows if file in ("all", row["test"].partition(":")[0]))
        lines.append(f"| {file} | {' | '.join(str(counted[kind]) for kind in kinds)} |")
    lines += ["", "What llama-server alone passes, and why:", "", "| test | why |", "|---|---|"]
    grouped: dict[tuple[str, str], int] = Counter(
        (row["test"].partition("[")[0], row["why"]) for row in rows if row["kind"] == THEIRS
    )
    lines += [f"| {test}{f' ({n})' if n > 1 else ''} | {reason or '?'} |" for (test, reason), n in grouped.items()]
    lines += ["", "What neither passes, with models other than theirs:", ""]
    lines += [f"* {name}" for name in dict.fromkeys(r["test"].partition("[")[0] for r in rows if r["kind"] == NEITHER)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
