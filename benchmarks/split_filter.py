"""A filter that sends nothing for frames without anything of interest: what it holds back, rightly and wrongly.

A ResNet-56 for CIFAR-10 is cut, its bottleneck trained for some minutes, and with it a filter for which animals are of
interest and vehicles are not. It may miss 1 % (5 %) of the training images of interest; counted are the 5,000 test
images. Nobody has told the network of these two kinds.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from _box import need, skip, write_results
from split import DEVIATION, MEAN, VISION

from edge_run.runtime.split.bundle import HEAD_FILE, read_bundle
from edge_run.runtime.split.images import ImageFolder
from edge_run.runtime.split.networks import INTEREST
from edge_run.runtime.split.onnx_session import open_session
from edge_run.runtime.split.train import TrainTask, train_split
from edge_run.runtime.split.training import TrainConfig

EMPTY = ("airplane", "automobile", "ship", "truck")
AT_ONCE = 100


def measure(folder: Path, out: Path, most_missed: float, epochs: tuple[float, float]) -> dict[str, Any]:
    """Train a split with a filter, and return what the filter does with the test images."""
    model = VISION / "resnet-cifar10" / "resnet56.onnx"
    task = TrainTask(model, folder / "train", "input", out, EMPTY, most_missed)
    train_split(task, TrainConfig(mean=MEAN, deviation=DEVIATION, feature_epochs=epochs[0], answer_epochs=epochs[1]))
    bundle = read_bundle(out / HEAD_FILE)
    images = ImageFolder(folder / "test", bundle.size)
    head = open_session(bundle.checked(HEAD_FILE), HEAD_FILE, None)
    name = head.get_inputs()[0].name
    scores = np.concatenate(
        [
            head.run([INTEREST], {name: images.batch(np.arange(start, min(start + AT_ONCE, len(images))))})[0]
            for start in range(0, len(images), AT_ONCE)
        ]
    ).ravel()
    (stored,) = bundle.code.filters
    wanted = ~np.isin(images.labels, [images.classes.index(one) for one in EMPTY])
    below = scores < stored.threshold
    return {
        "most_missed": most_missed,
        "interesting": int(wanted.sum()),
        "missed": int((below & wanted).sum()),
        "empty": int((~wanted).sum()),
        "held_back": int((below & ~wanted).sum()),
        "missed_held_out": stored.missed / stored.interesting,
        "held_back_held_out": stored.dropped / stored.empty,
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", nargs=2, type=float, default=(0.03, 0.1), metavar=("FEATURES", "ANSWERS"))
    epochs = tuple(parser.parse_args().epochs)
    need(VISION)
    if importlib.util.find_spec("torch") is None:
        skip("PyTorch is not installed: make torch")
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with zipfile.ZipFile(VISION / "cifar10-jpeg.zip") as archive:
            archive.extractall(folder)
        for most_missed in (0.01, 0.05):
            rows.append(measure(folder, folder / f"split-{most_missed}", most_missed, epochs))
            print(rows[-1], flush=True)
    lines = [
        f"* At most {row['most_missed']:.0%} to be missed: of {row['interesting']:,} images of interest "
        f"{row['missed']} were held back ({row['missed'] / row['interesting']:.1%}; on images held out of training "
        f"{row['missed_held_out']:.1%}), of {row['empty']:,} others {row['held_back']} "
        f"({row['held_back'] / row['empty']:.1%}; {row['held_back_held_out']:.1%})."
        for row in rows
    ]
    write_results("split-filter", rows, "\n".join([__doc__ or "", f"Trained for {epochs} epochs.", "", *lines]))


if __name__ == "__main__":
    main()
