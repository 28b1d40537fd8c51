"""Things that hold files, memory or processes, and give them back at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

_Closing = TypeVar("_Closing", bound="Closing")


class Closing(ABC):
    """A context manager that is closed when its block ends, however it does."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. Idempotent."""

    def __enter__(self: _Closing) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
