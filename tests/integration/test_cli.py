"""The command line as a user meets it: flags, prompts, settings, and what it says to bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edge_run
from edge_run import Model
from edge_run.base.results import Backend, Generation, IoUse, MemoryUse
from edge_run.cli.commands.run import run as run_command
from kit_models import GREEDY, KIT, PROMPT
from program import WAIT_S, assert_refused

pytestmark = pytest.mark.usefixtures("known_models")
KEYS = {field.name for field in dataclasses.fields(Generation)}
NESTED_KEYS = {
    name: {field.name for field in dataclasses.fields(kind)}
    for name, kind in {"memory": MemoryUse, "io": IoUse, "backend": Backend}.items()
}


@pytest.fixture(scope="module")
def expected() -> str:
    """What the library says after PROMPT."""
    with Model(KIT, context_tokens=256) as model:
        return model.generate(PROMPT, max_tokens=12, temperature=0).result().text


def test_prompt_is_continued_as_the_library_does(run, expected: str) -> None:
    result = run(KIT, "-p", PROMPT, "-n", 12, *GREEDY, is_begun=False)
    assert (result.returncode, result.stdout) == (0, expected.rstrip("\n") + "\n")
    assert re.match(r"12 tokens at [\d.,]+ tokens/s, the first after ", result.stderr)
    assert "memory at most" in result.stderr
    assert "\x1b" not in result.stderr


def test_prompt_from_standard_input_or_a_file_or_displayed(run, tmp_path: Path, expected: str) -> None:
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    told = expected.rstrip("\n") + "\n"
    assert run("-n", 12, *GREEDY, "-m", KIT, stdin=PROMPT + "\n").stdout == told
    assert run(KIT, "-f", "prompt", "-n", 12, *GREEDY, "--display-prompt").stdout == PROMPT + told


def test_standard_input_beside_a_prompt_is_said_not_to_be_read(run, expected: str) -> None:
    """It was ignored silently. It is not read, as it need not have an end, such as what ssh or a service gives."""
    result = run(KIT, "-p", PROMPT, "-n", 12, *GREEDY, stdin="Notes\n")
    assert (result.returncode, result.stdout) == (0, expected.rstrip("\n") + "\n")
    assert "standard input was not read: the prompt is that of -p or -f" in result.stderr
    assert "not read" not in run(KIT, "-n", 1, *GREEDY, stdin=PROMPT).stderr
    reading, writing = os.pipe()
    with open(writing, "wb"), open(reading, "rb") as silent:
        command = [sys.executable, "-m", "edge_run", str(KIT), "-p", PROMPT, "-n", "1", *map(str, GREEDY)]
        done = subprocess.run(command, stdin=silent, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0
    assert "not read" not in done.stderr


def test_json_has_the_documented_keys_and_is_alone(run, expected: str) -> None:
    result = run(
        KIT, "-p", PROMPT, "-n", 12, *GREEDY, "--json", "--seed", "-1", is_begun=False, PYTHONIOENCODING="ascii"
    )
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    answer = json.loads(result.stdout)
    assert answer.keys() == KEYS
    assert {name: answer[name].keys() for name in NESTED_KEYS} == NESTED_KEYS
    assert (answer["text"], answer["finish_reason"], answer["completion_tokens"]) == (expected, "length", 12)
    assert run(KIT, "-p", PROMPT, "-n", 1, *GREEDY, "--json", EDGE_RUN_DISPLAY_PROMPT="1").returncode == 0


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-n", "-1"], "predict", -1),
        (["-n8"], "predict", 8),
        (["--n-predict=-1"], "predict", -1),
        (["--seed", "-1", "-s", "7"], "seed", 7),
        (["-sys", "-s"], "system_prompt", "-s"),
        (["-m", "a", "-md", "b"], "draft", Path("b")),
        (["-f", "a", "-fa", "on"], "flash_attn", "on"),
        (["-j", "{}", "-jf", "b"], "json_schema_file", Path("b")),
        (["-b", "64", "-ub", "32"], "ubatch_size", 32),
        (["-c", "9", "-ctk", "q8_0", "-ctv", "q4_0"], "cache_type_k", "q8_0"),
        (["-cnv"], "conversation", True),
        (["-no-cnv"], "conversation", False),
        (["--raw"], "conversation", False),
        (["-r", "a b", "--stop", "-c", "--reverse-prompt", "c"], "stop", ("a b", "-c", "c")),
        (["-p", "-ngl"], "prompt", "-ngl"),
        (["--memory", "4G"], "memory", 4 << 30),
        (["-vv"], "verbose", 2),
    ],
)
def test_options_are_read_as_they_are_meant(words, name, value, monkeypatch, environment) -> None:
    monkeypatch.setenv("HOME", environment["HOME"])
    context = run_command.make_context("run", ["model.gguf", *words])
    assert context.params.get(name) == value
    assert context.params["model_file"] == Path("model.gguf")


def test_file_named_like_a_command_can_be_run(run, tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(KIT)
    for words in (("./demo",), ("run", "demo")):
        assert run(*words, "-p", "x", "-n", 1).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.gguf", "-p", "x"], 3, r"missing\.gguf: .*check the path"),
        (["chat", "missing.gguf"], 3, r"missing\.gguf: .*check the path"),
        (["batch", "missing.jsonl", "-m", KIT, "-o", "out"], 2, r"missing\.jsonl: cannot be read .*check the path"),
        ([__file__, "-p", "x"], 3, "not a GGUF"),
        ([KIT, "-p", "x", "--memory", "4Q"], 2, "'4Q': not a size.*--help"),
        ([KIT, "-p", "x", "--frob"], 2, "--frob"),
        ([KIT, "-p", "x", "-ngl", "99"], 2, "No such option.*-ngl"),
        ([KIT, "-p", "x", "-n", "many"], 2, "'many' is not a valid integer"),
        ([KIT, "-p", "x", "-n", "-2"], 2, "must be -1"),
        ([KIT, "-p", "x", "--temp", "-1"], 2, "temperature -1.0: must be 0"),
        ([KIT, "-p", "x", "-f", "y"], 2, "--prompt and --file: exclude each other"),
        ([KIT, "-p", "x", "--json", "--display-prompt"], 2, "--display-prompt and --json: exclude each other"),
        ([KIT, "-f", "nowhere"], 2, "nowhere: cannot be read .*check the path"),
        ([KIT, "-p", "x", "--grammar", "root ::= ("], 2, "grammar"),
        ([KIT, "-p", "x", "-sys", "y"], 2, "add -cnv"),
        ([KIT, "-p", "x", "-cnv"], 7, "no chat template"),
        ([KIT, "-p", "x", "-md", "draft.gguf"], 3, "draft.gguf"),
        ([KIT, "-p", "x", "--speculate", "draft"], 2, "-md"),
        ([KIT, "-p", "x " * 300, "-c", "256"], 8, "the context holds"),
        ([KIT], 2, "standard input is empty"),
        (["run"], 2, "model: none given"),
        (["inflate", KIT, "big.gguf"], 2, "--size"),
        (["inflate", KIT, "big.gguf", "--size", "1MiB"], 2, "ask for more"),
        (["demo", "--memory", "1MiB", "--size", "8MiB"], 4, "--memory"),
    ],
)
def test_bad_input_gets_one_line_and_its_code(run, arguments: list[object], code: int, message: str) -> None:
    result = run(*arguments)
    last = result.stderr.splitlines(keepends=True)[-1] if arguments[0] == "demo" else result.stderr
    assert_refused(subprocess.CompletedProcess([], result.returncode, result.stdout, last), code, message)


def test_minimum_that_a_refusal_names_works(run) -> None:
    refused = run(KIT, "-p", "x", "-n", 2, "--memory", "30MiB")
    assert_refused(refused, 4, "30 MiB")
    size = re.search(r"at least (\d+) MiB", refused.stderr)[1] + "MiB"
    assert run(KIT, "-p", "x", "-n", 2, "--memory", size).returncode == 0


def test_settings_come_from_file_environment_and_flags(run, tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".config" / "edge-run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('ctx-size = 128\ntop_k = 7\nseed = 1\nstop = ["zz"]\nprompt = "y"\n')
    settings = {"EDGE_RUN_SEED": "2", "EDGE_RUN_TOP_P": "0.5", "EDGE_RUN_FILE": "no-such-file"}
    result = run(KIT, "-n", 1, "-p", "x", "--top-p", 0.7, "-v", XDG_CACHE_HOME=str(tmp_path / "cache"), **settings)
    assert result.returncode == 0, result.stderr
    for line in (
        f"ctx-size = 128 ({folder}/config.toml)",
        f"top-k = 7 ({folder}/config.toml)",
        "seed = 2 (EDGE_RUN_SEED)",
        "top-p = 0.7 (flag)",
        "temp = 0.8 (default)",
        f"cache-dir = {tmp_path}/cache/edge-run (default)",
    ):
        assert f"{line}\n" in result.stderr


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("EDGE_RUN_MEMROY", "did you mean EDGE_RUN_MEMORY[?]"),
        ("EDGE_RUN_memory", "did you mean EDGE_RUN_MEMORY[?]"),
        ("EDGE_RUN_CTX", "did you mean EDGE_RUN_CTX_SIZE[?]"),
        ("EDGE_RUN_", "edge-run run --help lists them"),
    ],
)
def test_a_misspelled_variable_is_an_error(run, name: str, advice: str) -> None:
    assert_refused(run("plan", KIT, **{name: "4GiB"}), 2, f"{name}: no such setting; {advice}")


def test_a_misspelled_variable_stops_every_command_but_help(run) -> None:
    for words in ([KIT, "-p", "x"], ["doctor"], ["mesh", "status"], ["demo"]):
        assert_refused(run(*words, EDGE_RUN_MEMROY="4GiB"), 2, "EDGE_RUN_MEMROY: no such setting")
    for words in (["--version"], ["--help"], ["run", "--help"]):
        assert run(*words, EDGE_RUN_MEMROY="4GiB", _EDGE_RUN_COMPLETE="").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread = 1", "'thread': unknown; did you mean threads[?]"),
        ("qqqq = 1", "'qqqq': unknown; known are .*threads"),
        ("[run]\nthreads = 1", "'run': unknown; settings stand at the top of the file, in no table"),
        ("threads = ", "not a TOML file"),
        ("threads = true", "threads = True: must be one text or whole number"),
        ("model = 5", r"config\.toml: model = 5: must be one text"),
        ("also = 1.5", r"config\.toml: also = 1\.5: must be one text"),
        ("ctx-size = inf", "ctx-size = inf: must be one text or whole number"),
        ('threads = "all"', r"'all' is not a valid integer \(from .*config\.toml\)"),
    ],
)
def test_mistakes_in_the_configuration_file_are_named(run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text(text)
    assert_refused(run(KIT, "-p", "x", XDG_CONFIG_HOME=str(tmp_path)), 2, message)
    assert run("run", "--help", XDG_CONFIG_HOME=str(tmp_path)).returncode == 0


def test_a_configuration_file_may_begin_with_a_mark_of_its_editor(run, tmp_path: Path) -> None:
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text('memory = "20MiB"', encoding="utf-8-sig")
    assert_refused(run(KIT, "-p", "x", XDG_CONFIG_HOME=str(tmp_path)), 4, "memory budget 20 MiB: too small")


def test_help_and_version_load_nothing_heavy(run) -> None:
    check = "import sys, edge_run.cli; print({'numpy', 'llama_cpp', 'rich', 'jinja2'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "set()\n"
    assert run("--version").stdout == f"edge-run {edge_run.__version__}\n"
    told = run("--help").stdout
    assert all(f"  {code} " in told for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 130, 141, 143))
    assert run("run", "--help", COLUMNS="20").returncode == 0
    assert run().returncode == 2


def test_inflate_grows_and_never_replaces_unasked(run, tmp_path: Path) -> None:
    result = run("inflate", KIT, "big.gguf", "--size", "20MB", "--layers", 12)
    assert (result.returncode, result.stdout) == (0, "")
    assert 0 <= 20_000_000 - (tmp_path / "big.gguf").stat().st_size < 1_000_000
    (tmp_path / "mine.gguf").write_text("mine")
    assert_refused(run("inflate", KIT, "mine.gguf", "--size", "20MB"), 2, "--force")
    assert_refused(run("inflate", KIT, "other.gguf", "--size", "20MB", "--seed", -1), 2, "--seed")
    assert (tmp_path / "mine.gguf").read_text() == "mine"
    assert run("inflate", KIT, "mine.gguf", "--size", "20MB", "--force").returncode == 0
