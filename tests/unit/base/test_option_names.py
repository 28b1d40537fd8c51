"""Messages name an option as their reader gives it: as a flag on the command line, as a keyword in Python."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import edge_run
from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, option, options_as_flags, wording
from edge_run.base.options import make_config
from edge_run.cli.app import _run, app
from edge_run.cli.shared.options import FLAGS
from edge_run.cli.shared.settings_command import CommandGroup
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.processes.child_answer import give_answer, read_answer, request_line

ROOT = Path(__file__).parents[3]
FOLDERS = ("src/edge_run/base", "runtime", "tiers", "prefetch", "partition", "devices")
FOR_THE_COMMAND_LINE = (  # what only its commands run, with what `edge-run mesh` and `edge-run split` look after
    *("runtime/server", "runtime/client", "runtime/bench", "runtime/batches", "runtime/doctor", "runtime/worker"),
    *("runtime/split", "runtime/keeping/conversations.py", "devices/host/checkup.py", "devices/mesh/checkup.py"),
    *("partition/training_memory.py", "runtime/fetch/store.py", "devices/mesh/channel.py"),
    "src/edge_run/base/errors.py",  # has `option` itself
)
_FLAG = re.compile(r"(?:^|[\s(`'\"])(--[a-z]|-(?:c|t|v|n|p|b|ub|fa|md|ctk|ctv)\b)")
_FLAG_OR_PART = re.compile(r"--[a-z]|-(?:c|t|v|n|p|b|ub|fa|md|ctk|ctv)\b|-['\"]")  # at last: the end of a literal
_OTHER_PROGRAMS = ("edge-run ", "ulimit", "iconv")
_ITSELF = {"option", "wording"}  # calls whose arguments are names and wordings of flags


@pytest.mark.parametrize(
    ("given", "keyword", "flag"),
    [
        (("context_shift",), "context_shift=", "--context-shift"),
        (("memory",), "memory=", "--memory"),
        (("gpu_memory", 0), "gpu_memory=0", "--gpu-memory 0"),
        (("kv_spill", "off"), "kv_spill='off'", "--kv-spill off"),
        (("context_tokens", 512), "context_tokens=512", "-c 512"),
        (("op_offload", False), "op_offload=False", "--no-op-offload"),
        (("truncate", True), "truncate=True", "--truncate"),
        (("is_overwritten", True), "is_overwritten=True", "--force"),
        (("sequences", 1), "sequences=1", "--parallel 1"),
        (("kv_type", "f16", "-ctk"), "kv_type='f16'", "-ctk f16"),
    ],
)
def test_an_option_is_named_for_who_reads(given: tuple[Any, ...], keyword: str, flag: str) -> None:
    assert option(*given) == keyword
    with options_as_flags(lambda: FLAGS):
        assert option(*given) == flag
    assert option(*given) == keyword


def test_flags_count_in_all_threads_and_no_longer_than_the_block() -> None:
    found = []

    def note() -> None:
        found.append((option("memory"), wording("-v", "the log")))

    @options_as_flags(lambda: FLAGS)
    def fail() -> None:
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()
        raise ConfigError("as a command does")

    with pytest.raises(ConfigError):
        fail()
    note()
    assert found == [("--memory", "-v"), ("memory=", "the log")]


EXCLUDED: list[tuple[dict[str, Any], str, str]] = [
    ({"context_shift": True, "kv_spill": "on"}, "leave out kv_spill=", "leave out --kv-spill"),
    ({"kv_keep": 64, "context_shift": True}, "draft=, speculate= and context_shift=", "-md, --speculate and --cont"),
    ({"kv_keep": 64, "exact": True}, "exact=, flash_attention='off' and kv_type=", "--exact, -fa off and -ctk"),
    ({"kv_keep": 64, "backend": "llama.cpp"}, "leave out gpu_memory= and backend=", "--gpu-memory and --backend"),
    ({"kv_spill": "on", "backend": "llama.cpp"}, "leave out backend=", "leave out --backend"),
    ({"kv_spill": "on", "gpu_memory": "1GiB"}, "give gpu_memory=0", "give --gpu-memory 0"),
    ({"kv_type": "auto", "gpu_memory": None}, "give gpu_memory=0", "give --gpu-memory 0"),
    ({"repack": "on", "gpu_memory": None}, "give gpu_memory=0", "give --gpu-memory 0"),
    ({"context_shift": True, "gpu_memory": None}, "give gpu_memory=0", "give --gpu-memory 0"),
    ({"context_shift": True, "kv_type": "q8_0"}, "give kv_type='f16' or f32", "give -ctk f16 or f32"),
    ({"context_shift": True, "sequences": 2}, "sequences=1, or leave out draft=", "--parallel 1, or leave out -md"),
    ({"speculate": "draft"}, "give one (draft=)", "give one (-md)"),
    ({"exact": True, "flash_attention": "on"}, "leave out flash_attention=", "leave out -fa"),
    ({"exact": True, "micro_batch_tokens": 1}, "(micro_batch_tokens=)", "(-ub)"),
    ({"exact": True, "kv_type": "q8_0"}, "give kv_type='f16'", "give -ctv f16"),
    ({"exact": True, "gpu_memory": 1}, "give gpu_memory=0", "give --gpu-memory 0"),
]


@pytest.mark.parametrize(("options", "python", "command_line"), EXCLUDED)
def test_what_excludes_each_other_is_named(options: dict[str, Any], python: str, command_line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(python)) as refused:
        make_config(ModelConfig, options)
    assert not _FLAG.search(str(refused.value))
    with options_as_flags(lambda: FLAGS), pytest.raises(ConfigError, match=re.escape(command_line)):
        make_config(ModelConfig, options)


def test_the_command_line_names_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["run", "none.gguf", "-p", "x", "--context-shift", "--kv-spill", "on"], Terminal()) == 2
    assert "; leave out --kv-spill" in capsys.readouterr().err


def test_a_child_process_is_told_how_options_are_named_here() -> None:
    assert json.loads(request_line(path=Path("m.gguf"))) == {"path": "m.gguf", "flags": None}
    with options_as_flags(lambda: {"context_tokens": "-c"}):
        assert json.loads(request_line(n=1)) == {"n": 1, "flags": {"context_tokens": "-c"}}


@pytest.mark.parametrize(("flags", "named"), [(None, "context_tokens=5"), ({"context_tokens": "-c"}, "-c 5")])
def test_a_child_process_names_them_so(
    flags: dict[str, str] | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()

    def make() -> str:
        raise ConfigError(f"give {option('context_tokens', 5)}")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        give_answer(make, flags)
    with pytest.raises(ConfigError, match=f"^give {named}$"):
        read_answer(written.getvalue())


def _calls(nodes: list[ast.AST], names: set[str]) -> list[ast.Call]:
    return [
        one for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in names
    ]


def _nodes(wanted: re.Pattern[str]) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the path and the syntax of each file that has what is wanted somewhere: the others need no parsing."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if wanted.search(text):
            yield path.relative_to(ROOT).as_posix(), list(ast.walk(ast.parse(text)))


def _keywords() -> set[str]:
    """Return what Python's users can give by name."""
    found = set[str]()
    for kind in (getattr(edge_run, name) for name in edge_run.__all__):
        if dataclasses.is_dataclass(kind):
            found |= {field.name for field in dataclasses.fields(kind)}
        methods = [one for _, one in inspect.getmembers(kind, inspect.isfunction)] if inspect.isclass(kind) else [kind]
        for one in filter(inspect.isfunction, methods):
            found |= inspect.signature(one).parameters.keys()
    return found


def _flags(group: CommandGroup) -> set[str]:
    context, found = click.Context(group), set[str]()
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        if isinstance(command, CommandGroup):
            found |= _flags(command)
        for one in command.params:
            found |= {*one.opts, *one.secondary_opts}
    return found


def test_each_option_that_a_message_names_is_a_keyword_and_a_flag() -> None:
    calls = [call for _, nodes in _nodes(re.compile("option")) for call in _calls(nodes, {"option"})]
    named = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert len(named) > 20
    assert named <= _keywords()
    flags = _flags(app)
    with options_as_flags(lambda: FLAGS):
        assert not {name for name in named if option(str(name)) not in flags}


def test_no_message_for_all_has_a_flag_of_its_own() -> None:
    """It would be one that Python does not have."""
    found = []
    for path, nodes in _nodes(_FLAG_OR_PART):
        if path.startswith(FOR_THE_COMMAND_LINE):
            continue
        bare = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}  # docstrings
        calls = _calls(nodes, _ITSELF)
        known = {id(one) for call in calls for one in (*call.args, *(word.value for word in call.keywords))}
        for one in nodes:
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in bare | known:
                is_program = one.value == "-c" or any(program in one.value for program in _OTHER_PROGRAMS)
                if _FLAG.search(one.value) and not is_program:
                    found.append(f"{path}:{one.lineno}: {one.value}")
    assert not found, "name the option with `option`"
