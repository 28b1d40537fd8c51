"""Chats that are killed at random moments: the next start is right, nothing is half, and no folder grows without bound.

    prompt_cache_kills.py [--kills 100] [--seed 0] [--model MODEL.gguf]

A chat of three messages with a prompt cache is killed (SIGKILL) at a random moment: after some of its answers, and then
after some part of the time that one takes; opening counts as an answer. What was kept is then looked at: each
conversation can be read and ends with a complete answer. A new process goes on with it (chat --continue) and asks what
was not answered yet: the whole must read as in a chat that nobody killed. All chats share one folder, of which only
whole rows are erased before each: drafts that a kill left stay.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _box import KIT, write_results

from edge_run.runtime.keeping.conversations import Conversations
from edge_run.runtime.keeping.store import kept_bytes

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"  # the kit model has none of its own
SETTINGS = ["-c", "1024", "-ub", "32", "-t", "1", "-n", "64", "--temp", "0", "--chat-template", TEMPLATE]
MESSAGES = (
    "Once upon a time there was a fox who lived in a small house at the end of the wood. " * 14,
    "The next day",
    "In the end",
)


def chat(
    home: Path, arguments: Sequence[object], messages: Sequence[str], death: tuple[int, float] | None = None
) -> str:
    """Run a chat to its end; return what went wrong, empty for nothing. death: after how many answers, and seconds."""
    environment = {**os.environ, "HOME": str(home), "OMP_WAIT_POLICY": "passive"}
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_run", "chat", *map(str, arguments), *SETTINGS],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    text = "".join(f"{message}\n" for message in messages)
    if death is None:
        _, said = process.communicate(text)
        return said if process.returncode else ""
    with process:
        assert process.stdin
        assert process.stderr
        process.stdin.write(text)
        process.stdin.close()
        n_answers, delay_s = death
        while n_answers and (line := process.stderr.readline()):
            n_answers -= "tokens/s" in line
        time.sleep(delay_s)
        process.kill()
    return ""


def main() -> None:
    """Kill, go on, compare, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=KIT)
    arguments = parser.parse_args()
    rng, failures, n_answers = random.Random(arguments.seed), list[str](), [0] * (len(MESSAGES) + 1)
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as folder:
        plain, home = Path(folder) / "plain", Path(folder) / "home"
        chat(plain, [arguments.model], MESSAGES)
        wanted = Conversations(plain / ".cache" / "edge-run" / "prompts").latest().parts
        prompts = home / ".cache" / "edge-run" / "prompts"
        kept, sizes = Conversations(prompts), list[int]()
        chat(home, [arguments.model], MESSAGES)  # what is found about the model is found
        began = time.monotonic()
        chat(home, [arguments.model], MESSAGES)
        whole_s = time.monotonic() - began
        for name, _ in kept.names():
            kept.remove(name)
        for number in range(arguments.kills):
            for path in prompts.rglob("*.rows"):  # each chat is to write its own
                path.unlink()
            death = rng.randrange(len(MESSAGES)), rng.uniform(0, whole_s / (1 + len(MESSAGES)))
            chat(home, [arguments.model], MESSAGES, death)
            problem, answered = "", 0
            if names := kept.names():
                conversation = kept.load(names[0][0])
                said = conversation.parts
                answered = next((n for n in range(len(MESSAGES) + 1) if said == wanted[: 2 * n]), 0)
                problem = chat(home, ["--continue"], MESSAGES[answered:]) if answered < len(MESSAGES) else ""
                if not problem and kept.load(names[0][0]).parts != wanted:
                    problem = "the text went on otherwise"
                for name, _ in names:
                    kept.remove(name)
            n_answers[answered] += 1
            rows.append({"kill": number + 1, "answers_kept": answered, "problem": problem})
            sizes.append(kept_bytes(prompts))
            if problem:
                failures.append(f"kill {number}: {problem}")
            print(f"{number + 1}: {answered} answers were kept {problem}", flush=True)
        drafts = list(prompts.rglob("*.part"))
    finding = (
        f"{__doc__}\n* Killed after 0, 1, ... answers: {n_answers}; failures: {failures}.\n"
        f"* Rows kept after the first and the last kill: {sizes[0]:,} and {sizes[-1]:,} bytes; drafts: {len(drafts)}."
    )
    print(finding)
    write_results("prompt-cache-kills", rows, finding)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
