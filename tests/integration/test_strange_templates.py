"""Templates that strangers wrote take no memory, no time and no process of ours; and a signal ends them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_run import Model, ModelFileError, TierReadError
from edge_run.runtime.generation.chat import ChatTemplate
from edge_run.runtime.processes import cell
from kit_models import KIT
from program import ending, next_line
from tight_limits import growing_less_than, quick
from waiting import until

USER = {"role": "user", "content": "Hello"}
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
POWER = "{{ (9 ** (9 ** (messages|length + 7))) % 7 }}"  # one operation, in which Python looks at no signal


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('a' * 3000000000)|length }}",
        "{% set x = namespace(t='a') %}{% for i in range(40) %}{% set x.t = x.t + x.t %}{% endfor %}{{ x.t|length }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ 'a'.center(3000000000) }}",
        "{{ strftime_now('%9000000000d') }}{{ 'a' * 3000000000 }}",
    ],
)
def test_a_template_that_takes_all_memory(source: str) -> None:
    with growing_less_than(200 << 20), pytest.raises(ModelFileError, match=r"more than 64 MiB|Error: ") as caught:
        ChatTemplate(source, "", "").render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [LOOPS, POWER])
def test_a_template_that_never_ends(source: str) -> None:
    template = ChatTemplate(source, "", "")
    started_s = time.monotonic()
    with quick(), pytest.raises(ModelFileError, match="takes longer than 1 s; give another one"):
        template.render([USER])
    assert time.monotonic() - started_s < 60


def test_a_template_that_is_nested_too_deeply() -> None:
    with pytest.raises(ModelFileError, match=r"RecursionError|ends the process|takes more|too many"):
        ChatTemplate("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "", "").render([USER])


def test_after_a_limit_the_next_conversation_is_rendered() -> None:
    template = ChatTemplate("{{ 'a' * (messages|length - 1) * 3000000000 }}{{ messages[0].content }}", "", "")
    for _ in range(2):
        with pytest.raises(ModelFileError, match="64 MiB"):
            template.render([USER, USER])
        assert template.render([USER]) == "Hello"


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 200_000}] * 4
    assert len(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "", "").render(messages)) == 4_000_000


def test_a_model_whose_template_is_broken_completes_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "metadata", lambda self, key: "{% if %}")
    with Model(KIT, context_tokens=64, threads=1) as model:
        assert model.generate("Once", max_tokens=2).result().completion_tokens == 2
        with pytest.raises(ModelFileError, match=r"chat template of the model file, line 1: .* use plain completion"):
            model.chat([USER])


def test_what_starting_a_process_takes_is_not_in_the_time_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and Jinja are read from a drive that is busy with weights."""
    start = cell.start_command
    monkeypatch.setattr(cell, "start_command", lambda code: start(f"import time; time.sleep(1.5); {code}"))
    with quick():
        assert ChatTemplate("{{ messages[0].content }}", "", "").render([USER]) == "Hello"


def test_a_process_that_does_not_start_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    start = cell.start_command
    monkeypatch.setattr(cell, "start_command", lambda code: start(f"import time; time.sleep(60); {code}"))
    monkeypatch.setattr(cell, "STARTING_S", 0.3)
    with pytest.raises(TierReadError, match=r"has not started in 0.3 s"):
        ChatTemplate("{{ 1 }}", "", "").render([USER])


def test_words_of_a_stranger_are_no_ctrl_c() -> None:
    one = cell.Cell("edge_run.runtime.generation.template_jobs")
    assert one.ask("compile_template", source="{{ x }}", is_override=False) == b""
    child = one._child
    assert child is not None
    child.notices.write(b"expecting a name at KeyboardInterrupt: nothing else\n")
    child.notices.flush()
    child.process.send_signal(signal.SIGABRT)
    assert isinstance(one._ending(child), cell.Overrun)


def test_a_cell_that_was_ended_from_outside_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "subprocess", subprocess)  # whose children this process can wait for
    template = ChatTemplate("{{ messages[0].content }}", "", "")
    assert template.render([USER]) == "Hello"
    child = template._cell._child.process.pid
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert template.render([USER]) == "Hello"


RENDERS = """
import sys
from edge_run.runtime.generation.chat import ChatTemplate
from edge_run.runtime.generation.request import Request
template = ChatTemplate(sys.argv[1], "", "")
print("ready", flush=True)
template.render([{"role": "user", "content": "x"}])
"""


@pytest.fixture
def rendering() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that renders a template; it is rendering when it is returned."""
    with contextlib.ExitStack() as stack:

        def start(source: str) -> subprocess.Popen[str]:
            words = [sys.executable, "-c", RENDERS, source]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(ending(process))
            assert next_line(process) == "ready\n"
            until(lambda: is_busy(process.pid), 50, lambda: "nothing is rendered")
            return process

        yield start


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGKILL, "")])
def test_a_signal_ends_rendering_and_its_process(
    rendering: Callable[[str], subprocess.Popen[str]], number: signal.Signals, word: str
) -> None:
    process = rendering(POWER)
    (child,) = children(process.pid)
    process.send_signal(number)
    assert word in process.communicate(timeout=60)[1]
    until(lambda: has_ended(child), 50, lambda: "the child goes on")


def has_ended(process: int) -> bool:
    """Whether a process is gone, or is only left for others to ask how it ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True


def test_an_interrupt_ends_the_opening_of_a_model_whose_template_never_compiles(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "edge_run", str(KIT), "-p", "x", "--chat-template", "{{ (9 ** (9 ** 8)) % 7 }}"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        until(lambda: is_busy(process.pid), 60, lambda: "no template is compiled")
        started_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        notices = process.communicate(timeout=60)[1]
    assert (process.returncode, notices) == (130, "")
    assert time.monotonic() - started_s < cell.LONGEST_S - 2, "what ends every job may have ended it"


def is_busy(process: int) -> bool:
    """Whether a child of it is at a template that has no end: what comes before takes less."""
    found = [child for child in children(process) if b"template_jobs" in command(child)]
    return any(processor_s(child) > 1.0 for child in found)


def processor_s(process: int) -> float:
    """Return how long a process has computed; 0 for one that is gone."""
    with contextlib.suppress(OSError):
        user, system = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def command(process: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def test_this_process_does_not_import_jinja() -> None:
    code = RENDERS + "assert not any(name.startswith('jinja2') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "{{ 1 }}"], check=True, timeout=60, capture_output=True)


def test_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell.tempfile, "TemporaryFile", raise_no_folder)
    assert ChatTemplate("{{ messages[0].content }}", "", "").render([USER]) == "Hello"


def raise_no_folder() -> None:
    raise FileNotFoundError(2, "No usable temporary directory found")


def test_without_a_file_descriptor_it_is_said() -> None:
    used = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, before[1]))
    try:
        with pytest.raises(TierReadError, match=r"no process can be started .*Too many open files.*raise the limits"):
            ChatTemplate("{{ 1 }}", "", "").render([USER])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in used:
            os.close(descriptor)
    assert ChatTemplate("{{ 1 }}", "", "").render([USER]) == "1"
