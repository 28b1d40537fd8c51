"""Mutated model files: headers, hyperparameters, tensors, vocabularies, shards, broken one at a time in every way that
the test suite can think of, and each run by one process that runs them all.

A file counts as right when it is refused in one line by an error of ours, or runs with the tokens that llama.cpp's own
loader gives for the same file in another process, streamed in as little memory as can be and all resident. All else is
a defect: the process dies or hangs for 60 s, raises something else, takes 1 GiB more, leaves threads.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import KIT, ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

ARCHITECTURES = ("llama", "llama-moe", "qwen3moe", "gemma2", "gpt2", "deepseek2", "mamba2", "gpt-oss", "qwen2", "phi3")
SPLIT = ("llama", "qwen3moe")
SHARDS_SHARE = 0.15
RIGHT = ("refused", "ran")


def judged(result: dict[str, Any], reference: Any, path: Path) -> dict[str, Any]:
    """Return `result`; a run with other tokens than llama.cpp's, or that llama.cpp's loader cannot do, is a defect."""
    if result["outcome"] == "ran":
        theirs = reference.ask(path)
        if theirs.get("tokens") != result["tokens"]:
            result["message"] = f"tokens {result['tokens']}, llama.cpp: {theirs}"
            result["outcome"] = "ran differently"
    return result


def main() -> None:
    """Measure and write the results."""
    from fuzz_worker import Worker
    from mutations import mutate, mutate_shards
    from tiny_models import make_model, split_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one file to run")
    parser.add_argument("--keep", type=Path, help="a folder for the files that show a defect")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [make_model(architecture, folder) for architecture in ARCHITECTURES]
        models += [make_model("llama", folder, quantisation="Q4_0"), KIT, KIT]
        splits = [
            [split_model(make_model(architecture, folder, seed=seed), 3, folder) for seed in (0, 1)]
            for architecture in SPLIT
        ]
        worker, reference = Worker(folder / "cache", "edge-run"), Worker(folder / "cache", "llama.cpp")
        for number in [arguments.only] if arguments.only is not None else range(arguments.count):
            chance = random.Random(f"{arguments.seed}-{number}")
            broken = folder / "broken"
            broken.mkdir()
            if chance.random() < SHARDS_SHARE:
                sources, others = chance.choice(splits)
                path, model = broken / sources[0].name, f"{sources[0].stem[:-15]} in shards"
                told = mutate_shards(sources, others, broken, chance)
            else:
                source = chance.choice(models)
                path, model = broken / "model.gguf", source.stem
                told = mutate(source, path, chance)
            result = judged(worker.ask(path), reference, path)
            result["message"] = str(result.get("message", "")).replace(f"{broken}/", "")
            rows.append({"number": number, "model": model, "change": told, **result})
            rows[-1].pop("tokens", None)
            is_right = result["outcome"] in RIGHT
            print(*rows[-1].values(), "" if is_right else "DEFECT", sep="\t", flush=True)
            if arguments.keep and not is_right:
                shutil.copytree(broken, arguments.keep / str(number), dirs_exist_ok=True)
            shutil.rmtree(broken)
        worker.close()
        reference.close()
    counts = collections.Counter(row["outcome"] for row in rows)
    defects = [row for row in rows if row["outcome"] not in RIGHT]
    n_streamed = sum(bool(row.get("streamed")) for row in rows)
    slowest_s = max(float(str(row.get("wall_s", 60))) for row in rows)
    finding = (
        f"{__doc__}\n* {len(rows)} files of {len(models) - 1 + len(splits)} models, seed {arguments.seed}: "
        f"{counts['refused']} refused, {counts['ran']} ran right ({n_streamed} of them also streamed), "
        f"{len(defects)} defects.\n* Processes started to run them all: {worker.starts}.\n* Slowest: {slowest_s:.1f} s."
    )
    print(finding)
    if not arguments.dry:
        write_results("fuzz", rows, finding)


if __name__ == "__main__":
    main()
