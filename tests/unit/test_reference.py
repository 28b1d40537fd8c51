"""docs/reference.md says what the program has: every flag, default, setting, field, result key, error and member."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

import edge_run
from edge_run.base import bench, errors, mesh_status, profile, replay, results, split
from edge_run.base.config import ModelConfig
from edge_run.base.sampling_config import SamplingConfig
from edge_run.cli.app import SIGPIPE_CODE, app
from edge_run.cli.shared.chat import HELP
from edge_run.cli.shared.chat_loop import EXITS
from edge_run.cli.shared.config_file import read_config_file
from edge_run.cli.shared.options import SETTINGS
from edge_run.cli.shared.setting import BROKER_VARIABLE, ENVIRONMENT_PREFIX, KEY_VARIABLE, TEST_MODELS_VARIABLE, Setting
from edge_run.cli.shared.settings_command import CommandGroup
from edge_run.devices.host import findings
from edge_run.runtime.embedding import results as embedding
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.generation.async_stream import AsyncStream
from edge_run.runtime.generation.model import Model
from edge_run.runtime.generation.stream import Stream
from edge_run.runtime.split.async_model import AsyncSplitModel
from edge_run.runtime.split.model import SplitModel
from edge_run.runtime.tools import pack

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "reference.md").read_text(encoding="utf-8")
_HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_DEFAULT = re.compile(r"\[default: (.*?)\]")
_TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _sections() -> dict[str, str]:
    """Return the page's sections by heading; a command's arguments are no part of its heading."""
    parts = _HEADING.split(TEXT)
    names = [_command(name) if name.startswith("edge-run ") else name for name in parts[1::2]]
    assert TEXT.startswith("# Reference\n"), "something was put before the title"
    assert len(set(names)) == len(names), "two sections of one name"
    return dict(zip(names, parts[2::2], strict=True))


def _command(heading: str) -> str:
    """Return a command's heading without its arguments, which are in capitals or in brackets."""
    words = heading.split()
    return " ".join(word for word in words if word[0] not in "[-" and not word.rstrip(".").isupper())


SECTIONS = _sections()


def leaves() -> dict[str, click.Command]:
    """Return every command by its name; one of a group is `group name`."""
    found = {}
    for name, command in commands_of(app).items():
        own = commands_of(command) if isinstance(command, CommandGroup) else {}
        found.update({f"{name} {one}": command for one, command in own.items()} or {name: command})
    return found


def commands_of(group: CommandGroup) -> dict[str, click.Command]:
    """Return the commands of a group, each found under its own name."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    assert [command and command.name for command in found.values()] == list(found)
    return {name: command for name, command in found.items() if command}


LEAVES = leaves()


def rows(section: str) -> list[list[str]]:
    """Return the cells of the table in `section`, less its two head lines."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def keys(section: str) -> list[str]:
    """Return the first word in code of each row."""
    return [re.match(r"`(\w+)", row[0])[1] for row in rows(section)]  # type: ignore[index]


def arguments(call: str) -> list[str]:
    """Return the names in a list of arguments."""
    return [name for name in (part.partition("=")[0].strip(" *") for part in call.split(", ")) if name]


def default_of(option: click.Option) -> str:
    """Return what `--help` says about an option that is not given."""
    if found := _DEFAULT.search(option.help or ""):
        return found[1]
    if option.required:
        return "required"
    return "yes" if option.is_flag and option.default is True else ""


def own_options(name: str) -> list[click.Option]:
    """Return the options that have a row: all of `run`, of the others those that they do not share with it."""
    options = [parameter for parameter in LEAVES[name].params if isinstance(parameter, click.Option)]
    return [option for option in options if name == "run" or not isinstance(option, Setting)]


def dataclasses_of(module: ModuleType) -> list[type]:
    return [
        member
        for member in vars(module).values()
        if inspect.isclass(member) and dataclasses.is_dataclass(member) and member.__module__ == module.__name__
    ]


RESULTS = [
    kind
    for module in (results, embedding, findings, profile, bench, replay, split, mesh_status, pack)
    for kind in dataclasses_of(module)
]


@pytest.mark.parametrize("name", LEAVES)
def test_flags_and_their_defaults(name: str) -> None:
    found = [(set(_CODE.findall(row[0])), row[1].strip("`")) for row in rows(f"edge-run {name}")]
    wanted = [({*option.opts, *option.secondary_opts}, default_of(option)) for option in own_options(name)]
    names = [({name.strip() for name in names}, default) for names, default in wanted]
    assert found == names


@pytest.mark.parametrize("name", [name for name in LEAVES if name != "run"])
def test_settings_that_a_command_shares_with_run(name: str) -> None:
    command, text = LEAVES[name], SECTIONS[f"edge-run {name}"]
    listed = re.search(r"Settings of `run`: (.*?)\.(?:\s|$)", text, re.DOTALL)
    wanted = [next(n for n in p.opts if n.startswith("--")) for p in command.params if isinstance(p, Setting)]
    assert (_CODE.findall(listed[1]) if listed else []) == wanted


def test_kinds_that_a_flag_takes_are_named() -> None:
    cells = [row[0] + row[2] for row in rows("edge-run run")]
    for option, cell in zip(own_options("run"), cells, strict=True):
        if isinstance(option.type, click.Choice):
            assert all(choice in cell for choice in option.type.choices), cell


def test_every_setting_is_an_environment_variable_and_a_key() -> None:
    for setting in SETTINGS:
        first = next(name for name in setting.opts if name.startswith("--"))
        assert setting.key == first.removeprefix("--")
        assert setting.envvar == ENVIRONMENT_PREFIX + setting.key.upper().replace("-", "_")


def test_folders_of_the_cache_are_listed() -> None:
    root, found = DOCS.parent, set[str]()
    for path in [path for one in ("src/edge_run/base", "runtime", "devices") for path in (root / one).rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"cache(?:_folder)? / (\w+|\"[\w-]+\")", text):
            given = name if name[0] == '"' else re.findall(rf"^{name} = (\"[\w-]+\")$", text, re.MULTILINE)[0]
            found.add(given.strip('"'))
    assert {"inspected", "micro-batch", "paces", "prompts", "fetched"} <= found
    places = [row[0] for row in rows("Files") if row[0].startswith("cache folder")]
    assert found <= {name for place in places for name in re.findall(r"`([\w-]+)/`", place)}


def test_variables_that_are_named_exist() -> None:
    known = {*(setting.envvar for setting in SETTINGS), BROKER_VARIABLE, KEY_VARIABLE, TEST_MODELS_VARIABLE}
    pages = {page: page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")}
    named = {name for text in pages.values() for name in re.findall(r"EDGE_RUN_[A-Z_]*[A-Z]", text)}
    assert named
    assert named <= known


def test_configuration_files_can_be_read(tmp_path: Path) -> None:
    blocks = [match[1] for page in sorted(DOCS.glob("*.md")) for match in _TOML.finditer(page.read_text("utf-8"))]
    assert blocks
    for block in blocks:
        file = tmp_path / "config.toml"
        file.write_text(block, encoding="utf-8")
        assert read_config_file(file, SETTINGS)


@pytest.mark.parametrize("kind", [ModelConfig, SamplingConfig])
def test_configuration_fields_and_their_defaults(kind: type) -> None:
    fields = dataclasses.fields(kind)
    assert [(row[0].strip("`"), row[1].strip("`").replace('"', "'")) for row in rows(kind.__name__)] == [
        (field.name, repr(getattr(kind(), field.name))) for field in fields
    ]
    flags = {s.field: next(n for n in s.opts if n.startswith("--")) for s in SETTINGS if s.field}
    for field, row in zip(fields, rows(kind.__name__), strict=True):
        assert flags.get(field.name, "") in row[2]


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_result_keys(kind: type) -> None:
    assert keys(kind.__name__) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    "kind", [Model, AsyncModel, SplitModel, AsyncSplitModel, Stream, AsyncStream], ids=lambda kind: kind.__name__
)
def test_members(kind: type) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert set(keys(kind.__name__)) - {"path"} == public
    for name, row in zip(keys(kind.__name__), rows(kind.__name__), strict=True):
        member = getattr(kind, name, None)
        if call := re.match(r"`(\w+)\((.*)\)`", row[0]):
            wanted = [name for name in inspect.signature(member).parameters if name != "self"]  # type: ignore[arg-type]
            assert arguments(call[2]) == wanted


@pytest.mark.parametrize("name", ["Model", "plan", "probe", "inflate", "pack", "trace", "replay", "to_json"])
def test_arguments(name: str) -> None:
    call = re.search(rf"`{name}\(([^`]*)\)`", SECTIONS["Model" if name == "Model" else "Python"])
    assert call
    function = edge_run.Model.__init__ if name == "Model" else getattr(edge_run, name)
    assert arguments(call[1]) == [name for name in inspect.signature(function).parameters if name != "self"]


def test_public_names() -> None:
    assert set(edge_run.__all__) <= set(_CODE.findall(SECTIONS["Python"]))
    streams = edge_run.Stream, edge_run.AsyncStream, edge_run.ManyStream
    for kind in (*streams, edge_run.Batch, edge_run.Interrupt, edge_run.open_mesh):
        assert kind.__name__ in edge_run.__all__


def test_exit_codes() -> None:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, errors.EdgeRunError)]
    found = {int(row[0]): row[1].strip("`") for row in rows("Exit codes")}
    assert {code: name for code, name in found.items() if name} == {
        kind.exit_code: kind.__name__ for kind in kinds if "exit_code" in vars(kind)
    }
    assert {code for code, name in found.items() if not name} == {0, SIGPIPE_CODE, 128 + 15}


def test_commands_of_a_chat() -> None:
    named = set(_CODE.findall(SECTIONS["edge-run run"]))
    assert {*EXITS, *re.findall(r"/\w+", HELP)} <= named


def test_items_of_a_plan_are_named() -> None:
    root = DOCS.parent
    source = "".join(path.read_text(encoding="utf-8") for path in (root / "runtime").rglob("*.py"))
    made = set(re.findall(r'PlanItem\(\s*"([\w ]+)"', source))
    page = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    table = page.partition("## What a budget holds\n")[2].partition("\n#")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert made == set(_CODE.findall(dict(rows("PlanItem"))["`what`"]))
    assert made == set(_CODE.findall(" ".join(firsts)))


def test_links_between_pages_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [root / "README.md", root / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            place, _, anchor = target.partition("#")
            if "://" in place:
                continue
            file = (page.parent / place) if place else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in {_anchor(head) for head in heads}, f"{page.name}: {target}"


def _anchor(heading: str) -> str:
    """Return the name that a heading has in a link, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
