"""Opens a model for a command, and writes an answer as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.config import ModelConfig
from edge_run.base.errors import KernelError
from edge_run.base.interrupt import Interrupt, on_ctrl_c
from edge_run.base.results import Generation
from edge_run.cli.shared import figures
from edge_run.cli.shared.process import end_with
from edge_run.cli.shared.terminal import Terminal
from edge_run.runtime.formats.marked_output import THINK, THOUGHT

if TYPE_CHECKING:
    from edge_run.base.mesh import MeshOptions
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.generation.stream import Stream

NOTICE = "dim"
_ENDS_IF = "if its file is cut or its drive fails meanwhile, the system ends the process (SIGBUS)"


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer that was written.

    text: what it says; of a text that it continues, all of it.
    generation: its figures; None where it was interrupted before it could be measured.
    has_thoughts: whether something was thought, which is no part of the conversation.
    """

    text: str
    generation: Generation | None
    has_thoughts: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.generation is None or self.generation.finish_reason == "cancelled"

    @property
    def goes_on(self) -> bool:
        """Whether the conversation goes on with it: a thought alone that was cut off is no answer."""
        is_whole = self.generation is not None and self.generation.finish_reason == "stop"
        return bool(self.text) or (self.has_thoughts and is_whole)


class MarkedThoughts:
    """Puts marks around what a model thinks, as many models write them, where that is shown with what it says."""

    def __init__(self) -> None:
        self._is_thought = False  # what was shown last

    def shown(self, reasoning: str, content: str) -> str:
        """Return what to show of what comes next: thoughts, and what is said after them."""
        return self._marked(reasoning, is_thought=True) + self._marked(content, is_thought=False)

    def _marked(self, text: str, is_thought: bool) -> str:
        if not text:
            return ""
        mark = "" if is_thought == self._is_thought else f"{THINK}\n" if is_thought else f"\n{THOUGHT}\n\n"
        self._is_thought = is_thought
        return mark + text


@contextlib.contextmanager
def opened(
    path: Path,
    config: ModelConfig,
    terminal: Terminal,
    chat_template: str | None = None,
    is_quiet: bool = False,
    mesh: MeshOptions | None = None,
) -> Iterator[Model]:
    """Open the model at `path`, and say at a terminal what was planned. Raises like `Model`, and KeyboardInterrupt."""
    terminal.show(f"Opening {path.name}")
    interrupt = mesh.interrupt if mesh else Interrupt()
    with interrupt.hearing_signals():
        model = open_file(path, interrupt, config, chat_template, mesh)
    terminal.erase()
    with model:
        say_plan(model, config, terminal, is_quiet)
        yield model


def open_file(
    path: Path,
    interrupt: Interrupt,
    config: ModelConfig,
    chat_template: str | None = None,
    mesh: MeshOptions | None = None,
) -> Model:
    """Open the model at `path`, in any thread, and say nothing. Raises like `Model`. interrupt: ends that."""
    from edge_run.runtime.generation.model import Model
    from edge_run.runtime.llama._ggml import announce_end

    announce_end(partial(_end, path))
    return Model(path, config=config, chat_template=chat_template, mesh=mesh, interrupt=interrupt)


def say_plan(model: Model, config: ModelConfig, terminal: Terminal, is_quiet: bool = False) -> None:
    """Say what was planned, and what of it the user may not expect. is_quiet: only the latter."""
    if terminal.shows_notices:
        model.expect()
    backend = model.stats.backend
    if backend.name == "llama.cpp":
        terminal.say(f"llama.cpp's own loader runs this model, no budget is kept: {backend.reason}; {_ENDS_IF}")
    elif backend.reason:
        terminal.say(backend.reason)
    if 0 < model.trained_context_tokens < (config.context_tokens or 0):
        terminal.say(
            f"a context of {config.context_tokens:,} tokens, the model was trained on "
            f"{model.trained_context_tokens:,}: its text may be poor beyond them"
        )
    if model.plan.context_tokens < model.plan.wanted_context_tokens:
        terminal.say(f"a {figures.describe_context(model.plan)}")
    if config.kv_keep:
        terminal.say(
            f"each token looks at {config.kv_keep:,} tokens of the context at most (--kv-keep): the text is not "
            "what the model gives with all of them"
        )
    if model.plan.kv_type_reason:
        terminal.say(f"keys and values in {model.plan.kv_type_reason}")
    say_notices(model, terminal)
    if limits := model.speculation.reason:
        terminal.say(limits)
    if backend.name == "edge-run" and terminal.shows_notices and not is_quiet:
        terminal.say(figures.describe_plan(model.path.name, model.plan), NOTICE)
        if model.most_parallel > 1:
            _advise_packing(model, terminal)


def _advise_packing(model: Model, terminal: Terminal) -> None:
    """Say what `edge-run pack` would give to many answers at once, where it would give something."""
    packed = model.forecast(is_packed=True)
    found = model.forecast() if packed else None
    if found and packed and (told := figures.describe_packing(model.path, model.plan.model_bytes, found, packed)):
        terminal.say(told, NOTICE)


def say_notices(model: Model, terminal: Terminal, n_said: int = 0) -> int:
    """Say the notices of `model` after the first `n_said`; return how many there are."""
    for notice in model.notices[n_said:]:
        terminal.say(notice)
    return len(model.notices)


def _end(path: Path, what: str) -> None:
    end_with(
        f"edge-run: {path}: llama.cpp ended the process: {what}; check the file, the drive and the memory, or see "
        "edge-run doctor",
        KernelError.exit_code,
    )


def show(stream: Stream, model: Model, terminal: Terminal, before: str = "") -> WrittenAnswer:
    """Write `before` and then the answer, piece by piece; see `follow`."""
    with terminal.showing(lambda: figures.describe_wait(model.plan, model.progress)) as stop_showing:

        def write(text: str) -> None:
            nonlocal before
            stop_showing()
            terminal.write_answer(before + text)
            before = ""

        answer = follow(stream, model, write)
    terminal.end_line()
    return answer


def follow(stream: Stream, model: Model, write: Callable[[str], None]) -> WrittenAnswer:
    """Run an answer to its end, passing what to show to `write`. Ctrl-C ends it; before the first token it is empty."""
    said, marks, has_begun, has_thoughts = list[str](), MarkedThoughts(), False, False
    generation = None
    try:
        with contextlib.ExitStack() as answering:
            for piece in stream:
                if not has_begun:
                    # Until here Ctrl-C raises, so that it also ends the reading of a model that stays in memory.
                    answering.enter_context(on_ctrl_c(model.cancel))
                    has_begun = True
                text = piece.text if piece.content is None else piece.content
                has_thoughts = has_thoughts or bool(piece.reasoning)
                said.append(text)
                write(marks.shown(piece.reasoning or "", text))
                generation = piece.generation
    except KeyboardInterrupt:
        stream.close()
    return WrittenAnswer("".join(said), generation, has_thoughts)


def say_figures(answer: WrittenAnswer, terminal: Terminal, when_full: str = "") -> None:
    """Say why the answer ended and what it cost; of a chat, its speed only.

    when_full: what the user of a chat can do where the context is full.
    """
    generation = answer.generation
    if generation is None:
        terminal.say("Stopped.", NOTICE)
        return
    if reason := figures.describe_end(generation, when_full):
        terminal.say(reason)
    terminal.say(figures.describe_speed(generation), NOTICE)
    if not when_full:
        terminal.say(figures.describe_use(generation.plan, generation.memory, generation.io, generation.load_s), NOTICE)
        for line in (*figures.describe_experts(generation.experts), *figures.describe_spill(generation.kv_spill)):
            terminal.say(line, NOTICE)
