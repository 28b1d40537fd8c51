"""Commands at terminals: what comes on the screen, and what is typed."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path

from program import WAIT_S, Program, begin


class Screen:
    """`edge-run` at a terminal of its own. text: what came and was not waited for."""

    def __init__(self, environment: Mapping[str, str], *arguments: object, folder: Path | None = None) -> None:
        self._master, slave = pty.openpty()
        self.process = begin(
            Program([*map(str, arguments)]), stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder
        )
        os.close(slave)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Return what came up to and with `pattern` since the last call."""
        deadline = time.monotonic() + WAIT_S
        while not (match := re.search(pattern, self.text)):
            assert self._read(deadline), f"{pattern!r} did not come: {self.text!r}"
        seen, self.text = self.text[: match.end()], self.text[match.end() :]
        return seen

    def wait_asleep(self) -> None:
        """Wait until it waits for a key: whenever it was looked at for half a second, it did nothing."""
        deadline, n_times = time.monotonic() + WAIT_S, 0
        while n_times < 50:
            assert time.monotonic() < deadline, "it always does something"
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]
            n_times = n_times + 1 if state == "S" else 0
            time.sleep(0.01)

    def end(self) -> int:
        """Return the exit code, with all that came until then in `text`."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End it where it has not ended."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        """Add what comes next to `text`; return whether something did, and not the end. It must come in time."""
        ready = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]
        assert ready, f"neither more nor the end came: {self.text!r}"
        try:
            came = os.read(self._master, 1 << 16)
        except OSError:  # Linux's word for the end of a terminal
            return False
        self.text = (self.text + self._decoder.decode(came)).replace("\r\n", "\n")
        return bool(came)
