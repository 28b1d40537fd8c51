"""The command line as a user meets it: real processes, the bundled model, terminals, pipes, signals."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

import edge_run
from edge_run import Model
from edge_run.base.results import Backend, Generation, IoUse, MemoryUse
from edge_run.cli.commands.run import run as run_command
from program import run_anew, run_program

KIT = Path(edge_run.__file__).parent / "models" / "kit-dense-q4_0.gguf"
COMMAND = [sys.executable, "-m", "edge_run"]
PROMPT = "It was a dark evening, and"
GREEDY = ("--temp", "0", "-c", "256")
KEYS = {field.name for field in dataclasses.fields(Generation)}
NESTED_KEYS = {
    name: {field.name for field in dataclasses.fields(kind)}
    for name, kind in {"memory": MemoryUse, "io": IoUse, "backend": Backend}.items()
}
WAIT_S = 60

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without settings of the user's, and with a home of its own."""
    (tmp_path / "home").mkdir()
    foreign = ("EDGE_RUN_", "XDG_", "NO_COLOR", "FORCE_COLOR", "TTY_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "HOME": str(tmp_path / "home"), "TERM": "dumb"}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path):
    def run(*arguments: object, stdin: str = "", is_begun: bool = True, **settings: str) -> Result:
        """is_begun: in a process that has been started already, and has no settings of Python's."""
        run = run_program if is_begun else run_anew
        return run(*arguments, text=stdin, environment={**environment, **settings}, folder=tmp_path)

    return run


@pytest.fixture(scope="module")
def expected() -> str:
    """What the library says after PROMPT."""
    with Model(KIT, context_tokens=256) as model:
        return model.generate(PROMPT, max_tokens=12, temperature=0).result().text


def assert_one_line(result: Result, code: int, message: str) -> None:
    assert (result.returncode, result.stdout) == (code, "")
    assert re.fullmatch(rf"edge-run: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr


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


def test_json_has_the_documented_keys_and_is_alone(run, expected: str) -> None:
    result = run(
        KIT, "-p", PROMPT, "-n", 12, *GREEDY, "--json", "--seed", "-1", is_begun=False, PYTHONIOENCODING="ascii"
    )
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    answer = json.loads(result.stdout)
    assert answer.keys() == KEYS
    assert {name: answer[name].keys() for name in NESTED_KEYS} == NESTED_KEYS
    assert (answer["text"], answer["finish_reason"], answer["completion_tokens"]) == (expected, "length", 12)


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
        (["missing.gguf", "-p", "x"], 3, r"missing\.gguf"),
        ([__file__, "-p", "x"], 3, "not a GGUF"),
        ([KIT, "-p", "x", "--memory", "4Q"], 2, "'4Q': not a size.*--help"),
        ([KIT, "-p", "x", "--frob"], 2, "--frob"),
        ([KIT, "-p", "x", "-ngl", "99"], 2, "No such option.*-ngl"),
        ([KIT, "-p", "x", "-n", "many"], 2, "'many' is not a valid integer"),
        ([KIT, "-p", "x", "-n", "-2"], 2, "must be -1"),
        ([KIT, "-p", "x", "--temp", "-1"], 2, "temperature -1.0: must be 0"),
        ([KIT, "-p", "x", "-f", "y"], 2, "--prompt and --file: exclude each other"),
        ([KIT, "-f", "nowhere"], 2, "nowhere: cannot be read"),
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
    assert_one_line(subprocess.CompletedProcess([], result.returncode, result.stdout, last), code, message)


def test_minimum_that_a_refusal_names_works(run) -> None:
    refused = run(KIT, "-p", "x", "-n", 2, "--memory", "30MiB")
    assert_one_line(refused, 4, "30 MiB")
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
    assert_one_line(run("plan", KIT, **{name: "4GiB"}), 2, f"{name}: no such setting; {advice}")


def test_a_misspelled_variable_stops_every_command_but_help(run) -> None:
    for words in ([KIT, "-p", "x"], ["doctor"], ["mesh", "status"], ["demo"]):
        assert_one_line(run(*words, EDGE_RUN_MEMROY="4GiB"), 2, "EDGE_RUN_MEMROY: no such setting")
    for words in (["--version"], ["--help"], ["run", "--help"]):
        assert run(*words, EDGE_RUN_MEMROY="4GiB", _EDGE_RUN_COMPLETE="").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread = 1", "'thread': unknown; known are .*threads"),
        ("threads = ", "not a TOML file"),
        ("threads = true", "threads = True: must be one text or number"),
        ('threads = "all"', r"'all' is not a valid integer \(from .*config\.toml\)"),
    ],
)
def test_mistakes_in_the_configuration_file_are_named(run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text(text)
    assert_one_line(run(KIT, "-p", "x", XDG_CONFIG_HOME=str(tmp_path)), 2, message)
    assert run("run", "--help", XDG_CONFIG_HOME=str(tmp_path)).returncode == 0


def test_help_and_version_load_nothing_heavy(run) -> None:
    check = "import sys, edge_run.cli; print({'numpy', 'llama_cpp', 'rich', 'jinja2'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "set()\n"
    assert run("--version").stdout == f"edge-run {edge_run.__version__}\n"
    told = run("--help").stdout
    assert all(f"  {code} " in told for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 130, 141, 143))
    assert run("run", "--help", COLUMNS="20").returncode == 0
    assert run().returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_standard_output_is_one_line(environment: dict[str, str]) -> None:
    for words in ([KIT, "-p", "x", "-n", "3"], [KIT, "-p", "x", "-n", "3", "--json"], ["--help"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [*COMMAND, *words], stdin=DEVNULL, stdout=full, stderr=PIPE, text=True, env=environment, check=False
            )
        assert result.returncode == 5
        assert re.fullmatch(r"edge-run: standard output.*No space left.*\n", result.stderr)


def test_output_that_nobody_reads_ends_quietly(environment: dict[str, str]) -> None:
    words = [*COMMAND, KIT, "-p", PROMPT, "-n", "200", *GREEDY]
    with subprocess.Popen(words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment) as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 141


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_a_run(environment: dict[str, str], number: int, code: int) -> None:
    words = [*COMMAND, KIT, "-p", PROMPT, *GREEDY, "-c", "2048"]
    with subprocess.Popen(words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment) as process:
        first = process.stdout.read(5)
        process.send_signal(number)
        rest, notices = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert b"Traceback" not in notices
    if number == signal.SIGINT:
        assert first + rest
        assert re.match(rb"Stopped\.\n\d+ tokens at ", notices)
    else:
        assert notices == b""


class Screen:
    """A process at a terminal of its own."""

    def __init__(self, environment: dict[str, str], *arguments: object) -> None:
        self._master, slave = pty.openpty()
        words = [*COMMAND, *map(str, arguments)]
        self.process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what came up to and with `pattern` since the last call."""
        deadline = time.monotonic() + WAIT_S
        while not (match := re.search(pattern, self.text)):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.text!r}"
            self.text += self._read()
        seen, self.text = self.text[: match.end()], self.text[match.end() :]
        return seen

    def end(self) -> int:
        """Return the exit code, with all that came until then in `text`."""
        while data := self._read():
            self.text += data
        os.close(self._master)
        return self.process.wait(WAIT_S)

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
        except OSError:  # Linux's word for the end of a terminal
            return ""


@pytest.fixture
def screen(environment: dict[str, str]) -> Iterator[list[Screen]]:
    """A list to put screens on, which end with the test."""
    screens: list[Screen] = []
    yield screens
    for one in screens:
        one.process.kill()
        one.process.wait()


def test_interrupt_stops_an_answer_and_keeps_the_chat(environment: dict[str, str], screen: list[Screen]) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat = Screen(environment, KIT, *GREEDY, "-c", "2048", "--chat-template", template, "-sys", "Be kind.")
    screen.append(chat)
    assert "all of it stays in memory" in chat.wait_for("> ")
    chat.type("A story, \\\nplease\n")
    chat.wait_for(r"please\n\n?[^>]{10}")
    chat.process.send_signal(signal.SIGINT)
    assert "Stopped." in chat.wait_for(r"tokens/s[^>]*\n> ")
    chat.type("/stats\n")
    assert re.search(r"1 answer, \d+ tokens", chat.wait_for(r"opened in .*\n> "))
    chat.type("/clear\n")
    chat.wait_for("empty again.*\n> ")
    time.sleep(0.5)  # Python does not see a signal between the prompt and the wait for a key
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("Ctrl-C again or Ctrl-D leaves.\n> ")
    chat.type("\x04")
    assert chat.end() == 0
    assert "Traceback" not in chat.text


def test_full_context_does_not_end_the_chat(environment: dict[str, str], screen: list[Screen]) -> None:
    chat = Screen(environment, KIT, "--temp", 0, "-c", 256, "-ub", 64)
    screen.append(chat)
    chat.wait_for("> ")
    chat.type(f"{PROMPT} " * 30 + "\n")
    assert "the answer ends here; /clear begins anew" in chat.wait_for("\n> ")
    chat.type("and\n")
    assert "the context holds 256" in chat.wait_for("\n> ")
    chat.type("/clear\n")
    chat.wait_for("\n> ")
    chat.type("/exit\n")
    assert chat.end() == 0


def test_a_chat_leaves_out_its_oldest_turns_when_asked_to(
    environment: dict[str, str], screen: list[Screen], run: Any
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat = Screen(environment, KIT, *GREEDY, "-c", 256, "-ub", 64, "-n", 8, "--chat-template", template, "-sys", "Be.")
    screen.append(chat)
    chat.wait_for("> ")
    chat.type("/drop\n")
    assert "no turn that could be left out" in chat.wait_for("\n> ")
    for _ in range(2):
        chat.type(f"{PROMPT} " * 4 + "\n")
        chat.wait_for("tokens/s[^>]*\n> ")
    chat.type(f"{PROMPT} " * 22 + "\n")
    assert "/drop leaves out its oldest turns, /clear begins anew" in " ".join(chat.wait_for("\n> ").split())
    chat.type("/drop\n")
    said = " ".join(chat.wait_for("tokens/s[^>]*\n> ").split())
    kept = re.search(r"4 messages left out, the rest is read anew; (\S+) has them all\.", said)
    assert kept
    chat.type("/exit\n")
    assert chat.end() == 0
    whole = run("sessions", "show", kept[1]).stdout
    assert whole.count(PROMPT) == 8


def test_no_colour_and_no_control_codes_where_they_are_not_wanted(environment, screen: list[Screen]) -> None:
    once = Screen(environment, KIT, "-p", PROMPT, "-n", 4, *GREEDY)
    screen.append(once)
    assert once.end() == 0
    assert "\x1b" not in once.text
    coloured = Screen({**environment, "TERM": "xterm", "COLUMNS": "20"}, KIT, "-p", PROMPT, "-n", 4, *GREEDY)
    screen.append(coloured)
    assert coloured.end() == 0
    assert "\r\x1b[2K" in coloured.text


def test_inflate_grows_and_never_replaces_unasked(run, tmp_path: Path) -> None:
    result = run("inflate", KIT, "big.gguf", "--size", "20MB", "--layers", 12)
    assert (result.returncode, result.stdout) == (0, "")
    assert 0 <= 20_000_000 - (tmp_path / "big.gguf").stat().st_size < 1_000_000
    (tmp_path / "mine.gguf").write_text("mine")
    assert_one_line(run("inflate", KIT, "mine.gguf", "--size", "20MB"), 2, "--force")
    assert (tmp_path / "mine.gguf").read_text() == "mine"
    assert run("inflate", KIT, "mine.gguf", "--size", "20MB", "--force").returncode == 0


def test_demo_streams_and_leaves_nothing_behind(run, tmp_path: Path) -> None:
    result = run("demo", "--size", "120MiB", "--memory", "168MiB", "-n", 3, "--no-mmap")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("It was a dark evening, and the old man at the door")
    assert "\x1b" not in result.stderr
    for told in ("1. Growing", "pinned", "window", "in all", "is read again", "3 tokens at", "of the physical limit"):
        assert told in result.stderr
    assert list((tmp_path / "home" / ".cache" / "edge-run").iterdir()) == []


def test_demo_that_is_stopped_leaves_nothing_behind_and_can_be_kept(run, environment, tmp_path: Path) -> None:
    cache = tmp_path / "home" / ".cache" / "edge-run"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with subprocess.Popen([*COMMAND, "demo"], stdout=PIPE, stderr=PIPE, env=environment) as process:
            while not (cache.exists() and any(cache.glob("*/*"))):
                time.sleep(0.01)
            process.send_signal(number)
            assert b"Traceback" not in process.communicate(timeout=WAIT_S)[1]
        assert process.returncode == code
        assert list(cache.iterdir()) == []
    kept = run("demo", "--size", "9MiB", "--memory", "1GiB", "-n", 2, "--keep", "--no-mmap")
    assert "holds all 9 MiB" in kept.stderr
    words = re.search(r"Kept: edge-run (\S+) (.*)", kept.stderr)
    assert run(words[1], *words[2].split(), "-p", "x", "-n", 1).returncode == 0
    shutil.rmtree(cache)
