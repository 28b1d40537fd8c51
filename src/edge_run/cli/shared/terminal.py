"""Where words go: the answer and reports to standard output, everything else to standard error.

Whatever is written here is made printable first (`printable.py`), but for an answer that goes to no terminal.

Without a terminal there are plain lines only, each in one piece. Colour, terminal kinds and NO_COLOR are rich's affair.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from edge_run.base.errors import ConfigError, TierReadError, reason_of
from edge_run.base.files.texts import read_text
from edge_run.base.units import format_size
from edge_run.cli.shared.printable import PrintableStream, answer_text, one_line, printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console

SHOWING_S = 0.25
ERASE_LINE = "\r\x1b[2K"
PROMPT_GIVEN = "the prompt is that of -p or -f. For a text and a question: (cat FILE; echo QUESTION) | edge-run MODEL"
_COLOUR_ANYWHERE = {"FORCE_COLOR", "TTY_COMPATIBLE"}  # with which rich colours what goes to no terminal

_Result = TypeVar("_Result")


class OutputError(TierReadError):
    """Standard output takes nothing more: whatever is answered is lost."""


class Terminal:
    """The three standard streams of this process. Not thread-safe.

    has_codes: whether a terminal is of a kind that can erase, and tells what is pasted.
    """

    def __init__(self) -> None:
        self.can_ask, self.shows_answer, self.shows_notices = map(_is_terminal, (sys.stdin, sys.stdout, sys.stderr))
        self.has_codes = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self._has_transient = False
        self._is_in_line = False
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """Standard error."""
        if self._console is None:
            from rich.console import Console

            class Notices(Console):
                def on_broken_pipe(self) -> None:
                    """Fall silent; rich would end the process, and close standard output for it."""
                    self.quiet = True

            self._console = Notices(
                file=_raw(sys.stderr), soft_wrap=not self.shows_notices, highlight=False, markup=False, emoji=False
            )
        return self._console

    def write_answer(self, text: str) -> None:
        """Write a piece of the answer, at once. Raises BrokenPipeError when nobody reads, else OutputError."""
        if not text:
            return
        self._is_in_line = not text.endswith("\n")
        self._put(answer_text(text) if self.shows_answer else text)

    def write(self, text: str) -> None:
        """Write lines of a report to standard output. Raises like `write_answer`."""
        self.write_answer(printable(text))

    def percents(self, done: str) -> Callable[[int, int], None]:
        """Return what shows how much of so many bytes is `done` (a word for it), when told both."""
        shown = -1

        def show(done_bytes: int, all_bytes: int) -> None:
            nonlocal shown
            percent = 100 * done_bytes // all_bytes
            if percent > shown:
                shown = percent
                self.show(f"{percent:3} % of {format_size(all_bytes)} {done}")

        return show

    def end_line(self) -> None:
        """Finish the answer's last line, where it has not ended with one."""
        if self._is_in_line:
            self.write_answer("\n")

    def write_json(self, text: str) -> None:
        """Write `text` as a line of UTF-8, whatever the locale. Raises like `write_answer`."""
        if sys.stdout is not None:
            sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
        self._put(printable_json(text) + "\n")

    def write_result(self, result: _Result, is_json: bool, describe: Callable[[_Result], str]) -> None:
        """Write `result` to standard output as a line of JSON, or as `describe` puts it. Raises like `write_answer`."""
        if is_json:
            from edge_run.base.strict_json import to_json

            self.write_json(to_json(result))
        else:
            self.write(describe(result))

    def say(self, text: str, style: str = "") -> None:
        """Write a notice of one line. What fails here is not worth failing for."""
        self.say_lines(one_line(text), style)

    def say_lines(self, text: str, style: str = "") -> None:
        """Write a notice of several lines."""
        self.erase()
        with contextlib.suppress(OSError, ValueError):
            if self._is_in_line and self.shows_answer:
                self.end_line()
            if sys.stderr is None:  # for which rich would take standard output
                return
            if self.shows_notices or _COLOUR_ANYWHERE & os.environ.keys():
                self.console.print(printable(text), style=style or None)
            else:  # without rich, which takes long to load
                raw = _raw(sys.stderr)
                raw.write(f"{printable(text).expandtabs()}\n")
                raw.flush()

    def show(self, text: str) -> None:
        """Show `text` until something else is written; only at a terminal that can erase it."""
        if not (self.shows_notices and self.has_codes):
            return
        self.erase()
        width = _columns() - 1
        with contextlib.suppress(OSError):
            sys.stderr.write(_cut(one_line(text), width))
            sys.stderr.flush()
        self._has_transient = True

    @contextlib.contextmanager
    def showing(self, describe: Callable[[], str]) -> Iterator[Callable[[], None]]:
        """Show what `describe` returns, again and again, until the block ends or what is yielded is called.

        Nothing else may be written meanwhile.
        """
        is_over = threading.Event()

        def repeat() -> None:
            while not is_over.is_set():
                self.show(describe())
                is_over.wait(SHOWING_S)

        thread = threading.Thread(target=repeat, name="edge-run-progress", daemon=True)

        def stop() -> None:
            is_over.set()
            if thread.is_alive():
                thread.join()
            self.erase()

        try:
            if self.shows_notices and self.has_codes:
                thread.start()
            yield stop
        finally:
            stop()

    def erase(self) -> None:
        """Take back what `show` wrote."""
        if self._has_transient:
            self._has_transient = False
            with contextlib.suppress(OSError):
                raw = _raw(sys.stderr)
                raw.write(ERASE_LINE)
                raw.flush()

    def read_all(self, most_bytes: int, advice: str = "give one with -p") -> str:
        """Return standard input as text, less one line break at its end, and read no more than `most_bytes`.

        Raises ConfigError where there is more, or with `advice` where there is none.
        """
        try:
            text = read_text(sys.stdin.buffer, "standard input", most_bytes) if sys.stdin is not None else ""
        except OSError as error:
            raise TierReadError(f"standard input: cannot be read ({reason_of(error)})") from error
        text = text.removesuffix("\n")
        if not text:
            raise ConfigError(f"prompt: standard input is empty; {advice}")
        return text

    def say_unread(self, why: str, files: Sequence[Path] = ()) -> None:
        """Say that what was given on standard input was not read, and why, where something was given.

        files: that were read; as /dev/stdin, standard input may be one of them.
        """
        if has_input(sys.stdin) and not any(_is_open_as(file, sys.stdin) for file in files):
            self.say(f"standard input was not read: {why}")

    def _put(self, text: str) -> None:
        self.erase()
        try:
            if sys.stdout is None:
                raise OSError(0, "it is closed")
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output: cannot be written ({reason_of(error)})") from error


def has_input(stream: TextIO | None) -> bool:
    """Return whether there is something in a file from which nobody has read, or by now in a pipe. Waits for nothing.

    A file that another program reads too, as a shell that runs a command for each of its lines, is not meant for us.
    """
    try:
        import fcntl  # here, as other systems have none
        import termios

        number = stream.fileno() if stream is not None else -1
        mode = os.fstat(number).st_mode
        if stat.S_ISREG(mode):
            return os.lseek(number, 0, os.SEEK_CUR) == 0 < os.fstat(number).st_size
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return False
        found = fcntl.ioctl(number, termios.FIONREAD, bytes(4))
    except (ImportError, OSError, ValueError):  # or a stream that is closed, or none of the system's
        return False
    return int.from_bytes(found, sys.byteorder) > 0


def _is_open_as(path: Path, stream: TextIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except (OSError, ValueError):
        return False


def _raw(stream: TextIO) -> TextIO:
    """Return what takes escape codes of ours."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


def _cut(text: str, most_cells: int) -> str:
    """Return as much of a text, from its beginning, as has room in so many cells of a terminal."""
    if text.isascii():
        return text[:most_cells]
    from unicodedata import east_asian_width  # here, as hardly any text needs it

    for at, letter in enumerate(text):
        most_cells -= 2 if east_asian_width(letter) in "WF" else 1
        if most_cells < 0:
            return text[:at]
    return text


def _columns() -> int:
    """Return the width of the terminal that standard error is, as far as the system knows it."""
    with contextlib.suppress(OSError, ValueError):
        if columns := os.get_terminal_size(sys.stderr.fileno()).columns:
            return columns
    import shutil  # which takes long to load

    return shutil.get_terminal_size().columns


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
