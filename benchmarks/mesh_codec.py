#!/usr/bin/env python3
"""What coding activations between devices costs and saves: bytes, time, quality, and tokens/s over slow links.

    mesh_codec.py [--text FILE] [--tokens 48]

Quality: the model on two devices, half of the layers each, every activation coded or not: perplexity of a text
(each token of it predicted in one pass of the prompt's width), how far the logits are off, and in how many places the
best token is another one. Speed: two processes, the other behind a link of 5 or 20 Mbit/s (tbf in a network namespace,
needs root): tokens/s and the time of a prompt, with activations as they are, packed, and compact.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _box import NOVELS, ROOT, SHARED, need, write_results
from _mesh_box import need_mesh

sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_WAIT_POLICY"] = "passive"

WIDTH, PROMPT, TEXT_TOKENS = 128, 256, 896
OPTIONS = {"context_tokens": 1024, "micro_batch_tokens": WIDTH, "threads": 2, "memory": "4GiB"}
MODES = ("plain", "packed", "compact")
MODELS = tuple(SHARED / "models" / f"{name}.gguf" for name in ("kit-dense", "kit-moe"))


def in_halves(works: Sequence[Any], specs: Sequence[Any], hops: Any) -> Any:
    """Return a plan in which the other device has the second half of the layers."""
    from edge_run.partition.mesh_plan import MeshPlan

    here, there, n = specs[0].node, specs[1].node, len(works) - 2
    return MeshPlan((here, *(here if i < n // 2 else there for i in range(n)), here), 1, 0.05, {})


def force(mode: str) -> None:
    """Have this process send activations in one mode, whatever it saves."""
    from edge_run.runtime.mesh import activation_coding

    activation_coding.ActivationCoder._choose = lambda self, size, bytes_per_s: mode  # type: ignore[method-assign]


def quality(model: Path, mode: str, tokens: list[int]) -> tuple[dict[str, Any], np.ndarray]:
    """Return figures of one mode, and the logits after each token of the text."""
    from edge_run.base.config import ModelConfig
    from edge_run.base.mesh import LinkRate
    from edge_run.base.protocols import BatchToken
    from edge_run.runtime.mesh import coordinator
    from edge_run.runtime.mesh.engine import open_mesh_engine
    from edge_run.runtime.worker.worker import Worker
    from fake_mesh import Hub

    force(mode)
    coordinator.plan_ring = in_halves
    hub = Hub()
    hub.rates = {pair: LinkRate("", 0.001, 1e6) for pair in (("a", "b"), ("b", "a"))}
    config = ModelConfig(**{**OPTIONS, "outputs_per_pass": WIDTH}, mesh_activations="compact")
    worker = Worker(hub.join("b"), [model], dataclasses.replace(config, mesh_activations="exact"))
    worker.start()
    engine = open_mesh_engine(model, config, hub.join("a"))
    rows = []
    for start in range(0, len(tokens), WIDTH):
        batch = [BatchToken(t, start + i, wants_logits=True) for i, t in enumerate(tokens[start : start + WIDTH])]
        rows.append(engine.front.decode(batch).copy())
    use, width = engine.mesh_use, engine.model.metadata(f"{engine.gguf.architecture}.embedding_length")
    assert use is not None
    engine.close()
    worker.close()
    return {"ratio": round(use.sent_bytes / use.plain_bytes, 3), "width": int(width or 0)}, np.concatenate(rows)


def perplexity(logits: np.ndarray, tokens: list[int]) -> float:
    """Return that of the tokens after the first."""
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    log_chances = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(axis=1))
    return float(np.exp(-log_chances.mean()))


def coding_times(width: int) -> dict[str, tuple[float, float]]:
    """Return milliseconds to code and to decode the activation of one token of so many numbers."""
    from edge_run.runtime.mesh.activation_coding import _DECODE, _ENCODE

    activation = memoryview(np.random.default_rng(1).standard_normal(width).astype(np.float32)).cast("B")
    found = {}
    for mode in ("packed", "compact"):
        times: list[tuple[float, float]] = []
        for _ in range(200):
            started = time.perf_counter()
            code = _ENCODE[mode](activation)
            middle = time.perf_counter()
            _DECODE[mode](memoryview(code))
            times.append((middle - started, time.perf_counter() - middle))
        found[mode] = tuple(round(1e3 * statistics.median(column), 3) for column in zip(*times, strict=True))
    return found  # type: ignore[return-value]


def speed(model: Path, mode: str, rate: str, n_tokens: int) -> dict[str, Any]:
    """Return tokens/s and the time of a prompt over a slow link; what is coded decides edge-run, but for `plain`."""
    from edge_run.base.config import ModelConfig
    from edge_run.devices.mesh.opening import MeshConfig, open_mesh
    from edge_run.runtime.decoding.session import Session
    from edge_run.runtime.mesh import coordinator, links
    from edge_run.runtime.mesh.engine import open_mesh_engine
    from mesh_processes import MeshOfProcesses
    from namespaces import network

    coordinator.plan_ring = in_halves
    if mode == "plain":
        links.MeasuredLinks.speeds = lambda self, source, targets: {}  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, network(["far"]) as net:
        net.shape("far", rate)
        mesh = MeshOfProcesses(Path(folder), model, net.here)
        try:
            mesh.spawn("far", "4GiB", net.wrap("far"), 2 << 20, folder, net.addresses["far"]).wait_ready()
            here = open_mesh(MeshConfig(mesh.prepare_folder(Path(folder) / "here"), name="here", listen=(net.here,)))
            mesh.wait_for(here, 1)
            engine = open_mesh_engine(
                model, ModelConfig(**OPTIONS, mesh_activations="compact" if mode == "compact" else "exact"), here
            )
            session = Session(engine.front)
            started = time.monotonic()
            logits, _ = session.feed([(7 * i * i + 3) % 200 + 1 for i in range(PROMPT)])
            prompt_s, times = time.monotonic() - started, []
            for _ in range(n_tokens):
                started = time.monotonic()
                logits = session.step(int(logits.argmax()))
                times.append(time.monotonic() - started)
            use = engine.mesh_use
            assert use is not None
            engine.close()
            here.close()
        finally:
            mesh.close()
    return {
        "prompt_s": round(prompt_s, 2),
        "tokens_per_s": round(1 / statistics.median(times), 1),
        "went": " ".join(f"{kind}:{count}" for kind, count in sorted(use.activations.items())),
    }


def in_child(*arguments: Any) -> Any:
    """Return what a function of this file returns, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(*arguments).result()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=NOVELS)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    need(*MODELS, arguments.text)
    need_mesh(in_networks=True)
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        tokens = in_child(text_tokens, model, arguments.text)
        wanted = np.empty(0)
        for mode in MODES:
            figures, logits = in_child(quality, model, mode, tokens)
            wanted = logits if mode == "plain" else wanted
            other = logits.argmax(axis=1) != wanted.argmax(axis=1)
            width, times = figures["width"], in_child(coding_times, figures["width"])
            rows.append(
                {
                    "model": model.name,
                    "activations": mode,
                    "ratio": figures["ratio"],
                    "bytes_per_token": round(figures["ratio"] * 4 * width),
                    "encode_ms": times[mode][0] if mode in times else 0,
                    "decode_ms": times[mode][1] if mode in times else 0,
                    "perplexity": round(perplexity(logits, tokens), 4),
                    "largest_logit_difference": round(float(np.abs(logits - wanted).max()), 4),
                    "other_best_tokens": round(float(other.mean()), 4),
                    "link": "",
                }
            )
            print(rows[-1], file=sys.stderr)
        for rate in ("5mbit", "20mbit"):
            for mode in MODES:
                figures = in_child(speed, model, mode, rate, arguments.tokens)
                rows.append({"model": model.name, "activations": mode, "link": rate, **figures})
                print(rows[-1], file=sys.stderr)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    write_results("mesh-codec", [{key: row.get(key, "") for key in keys} for row in rows], finding(rows))


def text_tokens(model: Path, text: Path) -> list[int]:
    """Return the first tokens of a text from its middle."""
    from edge_run import Model

    with Model(model, memory="2GiB", context_tokens=1024) as one:
        words = text.read_text(encoding="utf-8")
        return one.tokenize(words[len(words) // 2 :][:8000])[:TEXT_TOKENS]


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in words."""
    words = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        plain, packed, compact = (row for row in own if not row["link"])
        words.append(
            f"{model}, {TEXT_TOKENS} tokens of a novel, two devices: packed activations have {packed['ratio']:.2f} of "
            f"the bytes, and change no logit ({packed['largest_logit_difference']:g}); compact ones have "
            f"{compact['ratio']:.2f}, change the best token in {compact['other_best_tokens']:.1%} of the places, and "
            f"perplexity from {plain['perplexity']:.3f} to {compact['perplexity']:.3f}."
        )
        for rate in dict.fromkeys(row["link"] for row in own if row["link"]):
            by_mode = {row["activations"]: row for row in own if row["link"] == rate}
            speeds = ", ".join(
                f"{mode} {row['tokens_per_s']} tokens/s, the prompt in {row['prompt_s']} s"
                for mode, row in by_mode.items()
            )
            words.append(f"At {rate}: {speeds}.")
    words.append(
        "A token's activation of these narrow models (1,280 and 1,024 bytes) fits the shaper's burst of 3,100 bytes, "
        "so tokens/s show what coding takes, and noise; the prompt shows the link."
    )
    return " ".join(words)


if __name__ == "__main__":
    main()
