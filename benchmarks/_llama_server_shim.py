"""`edge-run serve` behind the flags of llama-server, for `llama_server_tests.py`. What we do not have is left out."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # what llama-server takes where a model has no template
PASSED = {
    "--host": "--host",
    "--port": "--port",
    "--temp": "--temp",
    "--seed": "--seed",
    "--threads": "--threads",
    "--parallel": "--parallel",
    "--pooling": "--pooling",
    "--n-predict": "--n-predict",
    "--batch-size": "--batch-size",
    "--ubatch-size": "--ubatch-size",
    "--model-draft": "--draft",
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
}
SWITCHES = {"--embedding": "--embeddings", "--metrics": "--metrics", "--context-shift": "--context-shift"}


def main() -> None:
    """Become `edge-run serve`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in (*PASSED, "--model", "--alias", "--ctx-size", "--api-key", "--chat-template", "--chat-template-file"):
        parser.add_argument(flag, dest=flag)
    for flag in SWITCHES:
        parser.add_argument(flag, dest=flag, action="store_true")
    given, _ = parser.parse_known_args()
    values = {flag: value for flag, value in vars(given).items() if value}
    folder = Path(os.environ["TESTS_FOUND"]).parent
    model = Path(values["--model"])
    if "--alias" in values:  # a model's name is that of its file
        named = folder / f"{values['--alias']}.{model.stem}" / f"{values['--alias']}.gguf"
        named.parent.mkdir(exist_ok=True)
        if not named.is_symlink():
            named.symlink_to(model)
        model = named
    words = ["serve", str(model)]
    for flag, ours in PASSED.items():
        words += [ours, values[flag]] if flag in values else []
    words += [ours for flag, ours in SWITCHES.items() if flag in values]
    context = int(values.get("--ctx-size", 0))
    words += ["--ctx-size", str(context)] if context else []
    if "--api-key" in values:
        keys = folder / f"keys-{values['--port']}"
        keys.write_text(values["--api-key"])
        words += ["--api-key-file", str(keys)]
    if "--embedding" not in values:
        template = values.get("--chat-template-file") or values.get("--chat-template")
        words += ["--chat-template", CHATML if template in (None, "chatml") else template]
    os.execv(sys.executable, [sys.executable, "-m", "edge_run", *words])


if __name__ == "__main__":
    main()
