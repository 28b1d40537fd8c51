"""Every error that edge-run raises on purpose, and the exit code each one gives the CLI.

    EdgeRunError                 1   anything of ours that has no kind of its own
    ├── ConfigError(ValueError)  2   a flag or argument that cannot be
    ├── ModelFileError           3   the model file: missing, truncated, foreign, changed
    │   └── ModelFileMissing(FileNotFoundError) 3   it is not there
    ├── BudgetError(MemoryError) 4   a memory budget that cannot work
    ├── TierReadError(OSError)   5   a read or a write that the storage refused
    ├── KernelError              6   llama.cpp refused, failed, or is not the one we know
    │   └── LogitsError          6   the logits after one text are no numbers
    ├── NotSupported             7   a right request that this model or device cannot serve
    ├── ContextFull              8   the conversation is longer than the context
    ├── ProtocolError            9   what came over the network is malformed, truncated or foreign
    ├── MeshError               10   the mesh cannot do it: no broker, no lease, a member that refuses
    │   ├── DeviceLost          11   a device went away, froze, or was cut off
    │   └── NotTrusted          12   a device, key or model that was not allowed
    ├── PackedFileError         13   a packed file that is another model's, damaged, or cannot be read
    └── Cancelled              130   the caller stopped the work (Ctrl-C)

A message says what was tried, on what, what was found against what was needed, and what to do next,
in one line. The figures in it are also attributes of the exception (`error.minimum_bytes`); 0, or an empty text, is one
that the message does not have. An option is named as its reader gives it (`option`): `--memory` on the command line,
`memory=` in Python.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

_MISSING = errno.ENOENT
_OF_A_SIGNAL = "_edge_run_of_a_signal"
_Error = TypeVar("_Error", bound=BaseException)


@dataclass(eq=False, repr=False)
class EdgeRunError(Exception):
    """The root of the tree."""

    message: str
    exit_code = 1

    def __post_init__(self) -> None:
        super().__init__(self.message)


@dataclass(eq=False, repr=False, kw_only=True)
class _OfCounts:
    """An error of numbers: how many there were, and how many were needed."""

    found: int = 0
    needed: int = 0


@dataclass(eq=False, repr=False, kw_only=True)
class _OfSizes:
    """An error of sizes: how much there was, and how much was needed."""

    found_bytes: int = 0
    needed_bytes: int = 0


@dataclass(eq=False, repr=False, kw_only=True)
class ConfigError(_OfCounts, _OfSizes, EdgeRunError, ValueError):
    """A flag or argument that cannot be: out of range, of the wrong form, or against another one.

    line: of the text that is wrong.
    """

    line: int = 0
    exit_code = 2


@dataclass(eq=False, repr=False, kw_only=True)
class ModelFileError(_OfCounts, _OfSizes, EdgeRunError):
    """The model file is missing, is not a GGUF or ONNX file, is truncated, lacks a part, or changed while in use.

    position_bytes: in the file. line: of a text in it that is wrong.
    """

    position_bytes: int = 0
    line: int = 0
    exit_code = 3


class ModelFileMissing(ModelFileError, FileNotFoundError):
    """A model, network, image or trace is not there, or a file that belongs to one; the exit code is the same."""

    errno = _MISSING


@dataclass(eq=False, repr=False, kw_only=True)
class BudgetError(_OfSizes, MemoryError, EdgeRunError):  # this order: a MemoryError is allocated by its own `__new__`
    """The budget is smaller than the smallest that works (`minimum_bytes`), or more than is free.

    found_bytes: the budget, or what is free. needed_bytes: what the plan takes that found too little free.
    """

    minimum_bytes: int = 0
    exit_code = 4


@dataclass(eq=False, repr=False, kw_only=True)
class TierReadError(_OfSizes, EdgeRunError, OSError):
    """Storage refused a read or a write. What was resident stays resident; the pass is discarded.

    needed_bytes: to be read or written. position_bytes: in the file. found_bytes: what is free. errno: the system's
    number for the reason.
    """

    position_bytes: int = 0
    errno: int | None = None
    exit_code = 5


class KernelError(EdgeRunError):
    """llama.cpp refused a model or a batch, or its public structs are not the ones we know."""

    exit_code = 6


class LogitsError(KernelError):
    """The logits after one text are no numbers; other texts may have some. The exit code is the same."""


@dataclass(eq=False, repr=False, kw_only=True)
class NotSupported(_OfCounts, EdgeRunError):
    """The request is right, and this model or device cannot serve it."""

    exit_code = 7


@dataclass(eq=False, repr=False, kw_only=True)
class ContextFull(EdgeRunError):
    """The conversation does not fit the context (`context_tokens`).

    prompt_tokens: of a text that is too long by itself. needed_tokens: of text and answer.
    """

    context_tokens: int = 0
    prompt_tokens: int = 0
    needed_tokens: int = 0
    exit_code = 8


@dataclass(eq=False, repr=False, kw_only=True)
class _OfNode:
    """An error that may be of one device, `node`. Its message says nothing of it; as text it begins with it."""

    node: str = ""

    def __str__(self) -> str:
        text = super().__str__()
        return f"node {self.node}: {text}" if self.node else text


@dataclass(eq=False, repr=False, kw_only=True)
class ProtocolError(_OfNode, EdgeRunError):
    """What came over the network, or is about to be decoded, is malformed, truncated, too large or foreign.

    node: whose doing it is.
    """

    exit_code = 9


@dataclass(eq=False, repr=False, kw_only=True)
class MeshError(_OfNode, EdgeRunError):
    """The mesh cannot do it: the broker is away, another device leads, or a member refused. node: which one."""

    exit_code = 10


class DeviceLost(MeshError):
    """A device (`node`) is no longer there: it ended, froze, or was cut off."""

    exit_code = 11


class NotTrusted(MeshError):
    """A device (`node`), a key or a model that nobody allowed."""

    exit_code = 12


@dataclass(eq=False, repr=False, kw_only=True)
class PackedFileError(_OfCounts, EdgeRunError):
    """A packed file is another model's, damaged, of another version (`found`, `needed`), or cannot be read."""

    exit_code = 13


class Cancelled(EdgeRunError):
    """The caller stopped the work; what was generated so far stays valid."""

    exit_code = 130


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what only writes are refused for


def lacks_room(error: BaseException | None) -> bool:
    """Return whether `error` says that memory or a drive has less room than was needed."""
    is_full = isinstance(error, TierReadError) and error.errno in _FULL
    return is_full or isinstance(error, BudgetError)


_ADVICE = {
    errno.EIO: "check the drive",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "choose another folder",
    errno.EACCES: "check the permissions",
    errno.EMFILE: "close some files, or raise the limit (ulimit -n)",
    errno.ENFILE: "close some files, or end other programs",
    errno.EAGAIN: "end other programs, or raise the limit (ulimit -u)",
}
_NO_THREAD = "can't start new thread"  # which Python has no kind of error for
_flags: list[Callable[[], Mapping[str, str]]] = []  # the last one counts; empty: messages are for Python


@contextlib.contextmanager
def options_as_flags(flags: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Have messages that are made in this block, in any thread, name options as flags. Also a decorator.

    flags: returns those that are not called like the option, such as `-c` for `context_tokens`; it is asked when one is
    named.
    """
    _flags.append(flags)
    try:
        yield
    finally:
        _flags.remove(flags)


def flags_of_options() -> Mapping[str, str] | None:
    """Return the flags that count now, for a process that works for this one; None where messages are for Python."""
    return _flags[-1]() if _flags else None


def option(name: str, value: str | int | None = None, flag: str = "") -> str:
    """Return an option as who reads the message gives it: `--kv-spill off`, or in Python `kv_spill='off'`.

    name: the keyword in Python. value: what to give; None names the option alone (`--kv-spill`, `kv_spill=`). flag: one
    that does a part of it, as `-ctk` of `kv_type`, to be named instead of its own.
    """
    if (flags := flags_of_options()) is None:
        return f"{name}={'' if value is None else repr(value)}"
    flag = flag or flags.get(name) or f"--{name.replace('_', '-')}"
    if value is False:
        return flag.replace("--", "--no-", 1)
    return flag if value is None or value is True else f"{flag} {value}"


def wording(command_line: str, python: str) -> str:
    """Return the one of two wordings that who reads the message can follow, where `option` does not say it."""
    return command_line if _flags else python


def less_memory() -> str:
    """Return what takes less memory, as advice."""
    return f"a smaller {option('memory')} or a shorter context ({option('context_tokens')}) takes less"


def reason_of(error: BaseException) -> str:
    """Return why something failed: in the system's words where it was the system that refused."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def not_opened(error: Exception, message: str) -> ModelFileError:
    """Return the error for a model file that `error` kept from being opened."""
    return (ModelFileMissing if isinstance(error, FileNotFoundError) else ModelFileError)(message)


def from_system(error: OSError | MemoryError, what: str) -> EdgeRunError:
    """Return what the system refused while `what` was done as an error of ours, with what to do about it."""
    if isinstance(error, EdgeRunError):
        return error
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        return BudgetError(f"{what}: out of memory ({error or 'the system has no more'}); {less_memory()}")
    where = f"{error.filename}: " if error.filename else ""
    advice = _ADVICE.get(error.errno or 0, wording("-v shows more", "the log of level INFO shows more"))
    return TierReadError(f"{what}: {where}{reason_of(error)}; {advice}", errno=error.errno)


def of_a_signal(error: _Error) -> _Error:
    """Return `error`, which a program's own handler of a signal raised, marked as that: the system refused nothing."""
    with contextlib.suppress(AttributeError):
        setattr(error, _OF_A_SIGNAL, True)
    return error


@contextlib.contextmanager
def system_errors(what: str) -> Iterator[None]:
    """Raise what the system refuses in this block, where `what` is done, as an error of ours. Also a decorator."""
    try:
        yield
    except (OSError, MemoryError) as error:
        if isinstance(error, EdgeRunError) or getattr(error, _OF_A_SIGNAL, False):
            raise
        raise from_system(error, what) from error
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise from_system(OSError(errno.EAGAIN, str(error)), what) from error
