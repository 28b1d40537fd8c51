"""Settings as they are resolved, wherever they were said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.units import GIB
from edge_run.cli.app import _run
from edge_run.cli.commands import chat
from edge_run.cli.commands.batch import batch
from edge_run.cli.commands.doctor import check_configuration, doctor
from edge_run.cli.commands.run import run
from edge_run.cli.commands.serve import serve
from edge_run.cli.mesh import init
from edge_run.cli.shared.server_chat import ServerChat
from edge_run.cli.shared.settings import resolve
from edge_run.cli.shared.terminal import Terminal
from edge_run.cli.split.train import train
from edge_run.devices.host.findings import OK, PROBLEM
from edge_run.runtime.client.connection import ServerClient
from edge_run.runtime.keeping.conversations import Conversations


def config_of(*words: str) -> ModelConfig:
    with run.make_context("run", ["model.gguf", *words]) as context:
        return resolve(context, context.params).config


def test_the_home_folder_is_meant_where_no_shell_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("EDGE_RUN_KV_SPILL", "~/spill")
    (tmp_path / "settings" / "edge-run").mkdir(parents=True)
    (tmp_path / "settings" / "edge-run" / "config.toml").write_text(
        'prompt-cache = "~/prompts"\nalso = "~/copy.gguf"\n'
    )
    config = config_of("--packed=~/model.packed", "--draft=~/small.gguf")
    assert (config.spill_folder, config.prompt_folder) == (tmp_path / "spill", tmp_path / "prompts")
    assert (config.packed_file, config.draft_model) == (tmp_path / "model.packed", tmp_path / "small.gguf")
    assert Path(config.also or "") == tmp_path / "copy.gguf"


def test_words_and_other_places_stay_as_they_are() -> None:
    config = config_of("--kv-spill", "off", "--prompt-cache", "./off", "--packed", "off", "--also", "copy")
    assert (config.spills_kv, config.packed_file, str(config.also)) == (False, None, "copy")
    assert config.prompt_folder == Path("off")


def test_one_type_of_keys_and_values_has_one_name() -> None:
    """Under which findings and decisions are kept, for Python too."""
    assert config_of().kv_type == ModelConfig().kv_type
    assert [config_of(*words.split()).kv_type for words in ("--kv-type q8_0", "-ctk q8_0 -ctv q8_0")] == ["q8_0"] * 2
    assert config_of("-ctk", "q8_0").kv_type == "q8_0/f16"


@pytest.mark.parametrize("command", [["run"], ["trace", "-o", "t.csv"]], ids=["run", "trace"])
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["-p", "a prompt"], 3, "none.gguf"),
        (["-p", "a prompt", "-f", "file"], 2, "--prompt and --file: exclude each other"),
        ([], 2, "--file nowhere: cannot be read"),
    ],
)
def test_of_prompt_and_file_the_one_that_is_set_nearer_to_the_user_counts(
    command: list[str],
    words: list[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGE_RUN_FILE", "nowhere")
    assert _run([*command, "none.gguf", *words], Terminal()) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_is_named_once_and_nearer_to_the_user_than_another_that_is_set(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run([command, "one.gguf", "-m", "other.gguf", "-p", "x"], Terminal()) == 2
    assert "MODEL and --model: exclude each other; give one" in capsys.readouterr().err
    monkeypatch.setenv("EDGE_RUN_MODEL", "other.gguf")
    for words in (["one.gguf"], ["-m", "one.gguf"]):
        assert _run([command, *words, "-p", "x"], Terminal()) == 3
        assert capsys.readouterr().err.startswith("edge-run: one.gguf: ")
    assert _run([command, "-p", "x"], Terminal()) == 3
    assert capsys.readouterr().err.startswith("edge-run: other.gguf: ")


def test_a_model_in_the_configuration_excludes_no_chat_that_goes_on_or_has_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text('model = "none.gguf"\n')
    place = ["--prompt-cache", str(tmp_path / "prompts")]
    for words in (["--continue", *place], ["--server", "127.0.0.1:9"], ["-p", "x"]):
        assert _run(["chat", *words], Terminal())
        assert "exclude each other" not in capsys.readouterr().err


def test_a_model_in_the_configuration_is_no_name_at_a_server_nor_that_of_a_chat_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGE_RUN_MODEL", "/models/mine.gguf")
    asked: list[Any] = []
    monkeypatch.setattr(ServerClient, "get", lambda self, path: {"data": [{"id": "theirs"}]})
    monkeypatch.setattr(ServerChat, "run", lambda self, prompt: asked.append(self._settings["model"]))
    assert _run(["chat", "--server", "127.0.0.1:9"], Terminal()) == 0, capsys.readouterr().err
    assert _run(["chat", "--server", "127.0.0.1:9", "-m", "other"], Terminal()) == 0
    assert asked == ["theirs", "other"]
    monkeypatch.setattr(chat, "continued_model", lambda continued, named: asked.append(named) or Path("none.gguf"))
    monkeypatch.setattr(Conversations, "latest", lambda self: None)
    _run(["chat", "--continue", "--prompt-cache", str(tmp_path)], Terminal())
    assert asked[-1] is None


@pytest.mark.parametrize(
    "line",
    [
        "draft = 'small.gguf'",
        "draft = 'small.gguf'\nspeculate = 'draft'",
        "packed = 'off'",
        "chat-template = 'chatml'",
        "mesh = true",
    ],
)
def test_what_a_configuration_says_of_one_model_does_not_exclude_a_folder(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text(f"{line}\n")
    _run(["serve", "--models", str(tmp_path / "none")], Terminal())
    said = capsys.readouterr().err
    assert "exclude each other" not in said
    assert "needs a draft model" not in said
    assert _run(["serve", "--models", str(tmp_path / "none"), "--draft", "small.gguf"], Terminal()) == 2
    assert "--models and --draft: exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("server", "limit"), [("127.0.0.1:9", "max_tokens"), ("https://api.openai.com", "max_completion_tokens")]
)
def test_a_server_is_sent_what_was_given_and_nothing_else(
    server: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI refuses what it does not know."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    asked: list[Any] = []
    monkeypatch.setattr(ServerClient, "get", lambda self, path: {"data": [{"id": "theirs"}]})
    monkeypatch.setattr(ServerChat, "run", lambda self, prompt: asked.append(self._settings))
    assert _run(["chat", "--server", server], Terminal()) == 0
    assert _run(["chat", "--server", server, "-n", "4", "--temp", "0", "-j", '{"type": "object"}'], Terminal()) == 0
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert asked == [
        {"model": "theirs"},
        {"model": "theirs", limit: 4, "temperature": 0.0, "response_format": form},
    ]


@pytest.mark.parametrize(("name", "is_kept"), [("copies", True), ("not mounted now", True), ("copy.gguf", False)])
def test_copies_of_the_models_of_a_folder_are_in_a_folder(
    name: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "copies").mkdir()
    (tmp_path / "copy.gguf").touch()
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text(f"also = '{tmp_path / name}'\n")
    configs: list[ModelConfig] = []
    monkeypatch.setattr("edge_run.cli.commands.serve.report", lambda *given: configs.append(given[2]))
    words = ["serve", "--models", str(tmp_path / "none"), "--port", "0"]
    assert _run(words, Terminal()) == 2
    assert [config.also is not None for config in configs] == [is_kept]
    assert _run([*words, "--also", str(tmp_path / name)], Terminal()) == 2
    assert ("--models and --also FILE: exclude each other" in capsys.readouterr().err) != is_kept


@pytest.mark.parametrize("words", [["-p", "--help"], ["-sys", "-h"], ["--stop", "-h", "-p", "x"]])
def test_a_text_that_is_like_help_asks_for_none(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    (tmp_path / "edge-run" / "config.toml").write_text("threads = -1\n")
    assert _run(["none.gguf", *words], Terminal()) == 2
    assert "-1" in capsys.readouterr().err
    monkeypatch.setenv("EDGE_RUN_THREDS", "1")
    assert _run(["none.gguf", *words], Terminal()) == 2
    assert "EDGE_RUN_THREDS: no such setting" in capsys.readouterr().err
    assert _run(["run", "--help"], Terminal()) == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("threads = 'eight'", "threads = 'eight': 'eight' is not a valid integer"),
        ("ctx-size = '8k'", "ctx-size = '8k': '8k' is not a valid integer"),
        ("memory = 'lots'", "memory = 'lots': size 'lots'"),
        ("flash_attn = 'maybe'", "flash-attn = 'maybe': 'maybe' is not one of"),
        ("kv-type = 'foo'", "KV type 'foo': must be"),
        ("threads = 0", "threads 0: must be"),
        ("temp = -1", "temperature -1.0: must be"),
        ("predict = -2", "tokens to predict -2: must be"),
        ("prompt = 'a'\nfile = 'b'", "--prompt and --file: exclude each other"),
        ("kv-spill = 'on'\ncontext-shift = true", "context shift: needs all keys in memory"),
        ("threads = 2\nmemory = '4GiB'\ntemp = 0\nstop = ['a', 'b']\nseed = -1\ncheck-file = false", ""),
        ("", ""),
    ],
)
def test_the_doctor_runs_without_what_no_run_takes_of_a_configuration_and_says_so(
    line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    file = tmp_path / "edge-run" / "config.toml"
    file.write_text(f"cache-dir = 'caches'\n{line}\n")
    with doctor.make_context("doctor", []) as context:
        found = check_configuration(context)
        assert context.params["cache_dir"] == Path("caches"), "what is right counts"
        assert context.params["memory"] == (4 * GIB if "4GiB" in line else None)
    assert found.state == (PROBLEM if told else OK)
    assert found.finding.startswith(f"{file}: {told}" if told else str(file))


@pytest.mark.parametrize(
    ("key", "line", "words", "told"),
    [
        ("threads", "threads = 0", [], "threads 0: must be"),
        ("ubatch-size", "ubatch-size = -1", [], "micro-batch -1: must be"),
        ("kv-type", "kv-type = 'foo'", [], "KV type 'foo': must be"),
        ("temp", "temp = -1", [], "temperature -1.0: must be"),
        ("predict", "predict = -2", [], "tokens to predict -2: must be"),
        ("stop", "stop = ['']", [], "stop string: must not be empty"),
        ("flash-attn", "flash-attn = 'on'", ["--exact"], "exact: excludes flash attention"),
    ],
)
def test_what_no_run_takes_of_a_configuration_is_told_with_its_place(
    key: str,
    line: str,
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    file = tmp_path / "edge-run" / "config.toml"
    file.write_text(f"top-k = 5\n{line}\nreaders = 2\n")
    assert _run(["none.gguf", "-p", "x", *words], Terminal()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"edge-run: {told}")
    assert said.endswith(f" (from {file}: {key})\n")


def test_a_value_of_the_environment_is_told_with_its_variable_and_one_of_a_flag_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGE_RUN_THREADS", "0")
    assert _run(["none.gguf", "-p", "x"], Terminal()) == 2
    assert capsys.readouterr().err.endswith(" (from EDGE_RUN_THREADS)\n")
    assert _run(["none.gguf", "-p", "x", "-t", "-1"], Terminal()) == 2
    assert "from" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["run", "-p"], ["run", "-sys"], ["run", "--stop"], ["run", "--grammar"], ["run", "-j"], ["embed", "-p"]]
)
def test_text_that_is_no_utf_8_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([*words, os.fsdecode(b"na\xefve"), "none.gguf"], Terminal()) == 2
    said = capsys.readouterr().err
    assert "is not UTF-8 text (byte 0xef at letter 3); give it as UTF-8" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("line", ["a = " + "[" * 5000, 'prompt-cache = "a\\u0000b"'], ids=["too deep", "no path"])
def test_no_configuration_is_a_mistake_of_our_own(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge-run").mkdir()
    file = tmp_path / "edge-run" / "config.toml"
    file.write_text(f"{line}\n")
    assert _run(["sessions", "list"], Terminal()) == 2
    assert str(file) in capsys.readouterr().err
    with doctor.make_context("doctor", []) as context:
        assert check_configuration(context).state == PROBLEM


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["run", "--mesh-activations", "compact"], "--mesh"),
        (["run", "--mesh-any-numerics"], "--mesh"),
        (["run", "--keep", "0"], "--context-shift"),
        (["plan", "--kv-keep-by", "window"], "--kv-keep"),
    ],
)
def test_a_flag_that_does_nothing_without_another_is_refused(
    words: list[str], needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, flag, *value = words
    prompt = ["-p", "x"] if command == "run" else ["--no-probe"]
    assert _run([command, "none.gguf", *prompt, flag, *value], Terminal()) == 2
    assert f"{flag}: does nothing without {needed}; add that" in capsys.readouterr().err
    monkeypatch.setenv(f"EDGE_RUN_{flag.strip('-').upper().replace('-', '_')}", *(value or ["1"]))
    assert _run([command, "none.gguf", *prompt], Terminal()) == 3, "which may be meant for other commands"


def test_json_in_a_configuration_keeps_nobody_from_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    terminal.can_ask = True
    monkeypatch.setenv("EDGE_RUN_JSON", "1")
    assert _run(["none.gguf"], terminal) == 3, "it went on to open the model"
    assert _run(["none.gguf", "--json"], terminal) == 2, "a flag was meant for this command"


def test_a_chat_with_a_server_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise ConfigError("home folder: unknown")

    monkeypatch.setattr("edge_run.cli.shared.settings.cache_folder", unknown)
    monkeypatch.setattr(ServerClient, "get", lambda *_: {})
    monkeypatch.setattr(ServerChat, "run", lambda *_: None)
    assert _run(["chat", "--server", "8080"], Terminal()) == 0


def test_an_authority_without_a_broker_that_has_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(init, "checked_authority", lambda given: "/ca.pem")
    assert _run(["mesh", "init", "--authority", "ca.pem"], Terminal()) == 2
    assert "--authority: is for a TLS broker that is there; name it with --broker" in capsys.readouterr().err


def test_a_training_draws_alike_unless_another_seed_is_given() -> None:
    words = ["network.onnx", "--data", "images", "--cut", "stem"]
    with train.make_context("train", words) as context:
        assert context.params["seed"] == 0
    with pytest.raises(click.BadParameter, match="-1 is not in the range"):
        train.make_context("train", [*words, "--seed", "-1"])


def test_commands_without_a_chat_do_not_speak_of_one() -> None:
    helps = [
        next(str(one.help) for one in command.params if isinstance(one, click.Option) and one.name == "prompt_cache")
        for command in (run, serve, batch)
    ]
    assert [text.partition("[default: ")[2] for text in helps] == ["off; on in a chat]", "off]", "off]"]
