"""A ResNet-56 for CIFAR-10, split: bytes against accuracy on the 5,000 test images, JPEG and WebP beside it.

The teacher is the published network, as it is. The bottleneck is trained on the 50,000 training images (`--train`),
or read from where that left it. Codes are counted with their headers, JPEG and WebP without what is the same in all
files. The same is measured with no code above the bytes of its rate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from _box import MODELS, SHARED, need, skip, write_results

from edge_run.base.split import SplitBench
from edge_run.cli.shared.plot_file import PlotFile, write_figure
from edge_run.cli.split.bench import draw
from edge_run.runtime.split.bench import bench_split

VISION = SHARED / "data" / "vision"
BUNDLE = MODELS / "split-resnet56"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def train(data: Path, epochs: tuple[float, float]) -> str:
    """Train the bottleneck; return what came of it in a line."""
    from edge_run.runtime.split.train import TrainTask, train_split
    from edge_run.runtime.split.training import TrainConfig

    config = TrainConfig(mean=MEAN, deviation=DEVIATION, feature_epochs=epochs[0], answer_epochs=epochs[1])
    started, started_cpu = time.monotonic(), time.process_time()
    task = TrainTask(VISION / "resnet-cifar10" / "resnet56.onnx", data / "train", "input", BUNDLE)
    report = train_split(task, config, lambda text: print(f"\r{text:79}", end="", file=sys.stderr))
    minutes, cpu = (time.monotonic() - started) / 60, (time.process_time() - started_cpu) / 60
    return (
        f"Trained in {minutes:.0f} min, {cpu:.0f} min of CPU time, {epochs[0]} and {epochs[1]} epochs; head "
        f"{report.head_multiply_adds / 1e6:.1f} million multiply-adds, {report.head_share:.1%} of the network's."
    )


def table(result: SplitBench) -> list[str]:
    """Return the points of a result as lines of Markdown."""
    rows = ["| way | bytes | largest | right, % | against uncut, points |", "|---|---|---|---|---|"]
    for one in result.points:
        lost = 100 * (one.accuracy - result.model_accuracy)
        rows.append(
            f"| {one.name} | {one.mean_bytes:.1f} | {one.largest_bytes} | {100 * one.accuracy:.2f} | {lost:+.2f} |"
        )
    return rows


def main() -> None:
    """Train where asked to, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=2, type=float, metavar=("FEATURES", "ANSWERS"), help="epochs of either stage")
    parser.add_argument("--note", default="", help="a sentence about the training, for the result")
    given = parser.parse_args()
    need(VISION)
    if not (given.train or (BUNDLE / "head.onnx").exists()):
        skip(f"nothing was trained into {BUNDLE} so far: --train does so, with PyTorch (make torch)")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(VISION / "cifar10-jpeg.zip") as archive:
            archive.extractall(folder)
        data = Path(folder)
        trained = train(data, (given.train[0], given.train[1])) if given.train else given.note
        result = bench_split(BUNDLE / "head.onnx", data / "test")
        capped = bench_split(BUNDLE / "head.onnx", data / "test", most_bytes=256, baselines=False)
    print(*table(result), sep="\n")
    lines = [
        __doc__ or "", trained, "",
        f"Uncut: {result.model_accuracy:.2%} of {result.images:,} images right, {result.file_bytes:.0f} bytes each. "
        f"The largest code beyond 1.05 times its entropy: {result.worst_overhead_bytes:.1f} bytes, header included.",
        "", *table(result), "", "No code above 256 bytes:", "", *table(capped),
    ]  # fmt: skip
    rows = [
        {"most_bytes": most, "way": one.name, "mean_bytes": one.mean_bytes, "largest_bytes": one.largest_bytes,
         "accuracy": one.accuracy, "model_accuracy": bench.model_accuracy}
        for most, bench in (("", result), (256, capped))
        for one in bench.points
    ]  # fmt: skip
    written = write_results("split", rows, "\n".join(lines))
    picture = PlotFile(written.with_name(f"{written.name}.png"), is_replacing=True)
    write_figure(picture, lambda figure: draw(result, figure))


if __name__ == "__main__":
    main()
