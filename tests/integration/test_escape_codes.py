"""Escape codes of files and of the network at a real terminal: every command writes them out, or replaces them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGUFWriter

from edge_run.base.mesh_status import MeshLink, MeshMember, MeshStatus
from edge_run.cli.mesh.status import describe
from edge_run.cli.shared.terminal import Terminal
from kit_models import KIT
from known_device import know_device
from program import fresh_environment, run_program
from routes import write_trace
from screens import Screen
from vision_models import residual_network

NASTY = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\rfake"
# A line of progress erased, colours, and the terminal told to mark what is pasted, or not any more.
OURS = re.compile(r"\r\x1b\[2K|\x1b\[[0-9;]*m|\x1b\[\?2004(?:h|l\r)")


def on_terminal(folder: Path, *words: object, typed: str = "") -> str:
    """What a command wrote to a terminal until its end, less what is ours; `typed` is typed after its first `> `."""
    screen = Screen(fresh_environment(folder, TERM="xterm", COLUMNS="300"), *words, folder=folder)
    with contextlib.closing(screen):
        shown = ""
        if typed:
            shown = screen.wait_for("> ")
            screen.type(typed)
        screen.end()
    return OURS.sub("", shown + screen.text)


def assert_harmless(text: str, shown: str = "PWNED") -> None:
    assert shown in text
    found = [character for character in text if ord(character) < 32 or 127 <= ord(character) < 160]
    assert set(found) <= {"\n", "\t"}, repr(text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose name is an attack."""
    return Path(shutil.copy(KIT, tmp_path / f"a{NASTY}.gguf"))


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A network whose names are attacks."""
    path = residual_network(tmp_path)
    proto = onnx.load(path)
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for number, name in enumerate(names):
                names[number] = name + NASTY if name == "stem" else name
    onnx.save(proto, path)
    return path


def test_names_of_files(tmp_path: Path, model: Path) -> None:
    know_device(tmp_path / ".cache" / "edge-run", model)
    for words in (
        ["plan", model],
        ["doctor", model],
        [model, "-p", "x", "-n", "1"],
        ["inflate", model, model, "--size", "20MB"],
        ["pack", model],
        ["trace", model, "-p", "x"],
        ["bench", f"{model}.gone"],
        ["probe", f"{model}/gone"],
        ["replay", model],
        ["split", "inspect", model],
        ["split", "serve", model],
        ["mesh", "join", NASTY],
        ["mesh", "status", "--broker", f"mqtt://{NASTY}"],
    ):
        assert_harmless(on_terminal(tmp_path, *words), "")


def test_words_that_are_refused(tmp_path: Path) -> None:
    for words in (
        [KIT, f"--{NASTY}"],
        [KIT, "--memory", NASTY],
        [KIT, "--flash-attn", NASTY],
        ["mesh", NASTY],
        [KIT, "-p", "x", "--json-schema", json.dumps({"type": NASTY})],
        [KIT, "-p", "x", "--grammar", f"root ::= {NASTY}"],
    ):
        assert_harmless(on_terminal(tmp_path, *words))


def test_metadata_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, NASTY)
    writer.add_tensor("output.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for words in ([path, "-p", "x"], ["plan", path], ["doctor", path], [path, "-p", "x", "-vv"]):
        assert_harmless(on_terminal(tmp_path, *words))


def test_refusals_of_a_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('" + NASTY + "\\nedge-run: fake line') }}", encoding="utf-8")
    options = (KIT, "--chat-template", template)
    assert_harmless(on_terminal(tmp_path, *options, typed="hello\n/exit\n"))
    text = on_terminal(tmp_path, *options, "-cnv", "-p", "x", "--json")
    assert_harmless(text)
    assert len(text.splitlines()) == 1


def test_tensors_of_a_network(tmp_path: Path, network: Path) -> None:
    assert_harmless(on_terminal(tmp_path, "split", "inspect", network))


def test_traces(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / f"{NASTY}.routes")
    assert_harmless(on_terminal(tmp_path, "replay", trace, "--budget", "20KiB"))


def test_an_answer(tmp_path: Path) -> None:
    forced = (KIT, "-p", "x", "-n", 12, "--grammar", r'root ::= "\x1b[31m\x9b" "\n\t" "red"')
    text = on_terminal(tmp_path, *forced)
    assert "\ufffd[31m\ufffd\n\tred" in text
    assert_harmless(text, "red")
    result = run_program(*forced)
    assert (result.returncode, result.stdout) == (0, "\x1b[31m\x9b\n\tred\n")


def test_members_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    link = MeshLink(f"tcp://{NASTY}", 0.001, 1e8, "bb")
    members = tuple(
        MeshMember(node, NASTY + "\nfake line", True, {NASTY: NASTY}, (), {NASTY: NASTY}, (link,))
        for node in ("aa", "bb")
    )
    Terminal().write(describe(MeshStatus("c", f"mqtt://{NASTY}", "aa", 1, {"model": f"{NASTY}\nfake"}, members)))
    text = capsys.readouterr().out
    assert_harmless(text)
    assert not any(line.startswith("fake") for line in text.splitlines())
