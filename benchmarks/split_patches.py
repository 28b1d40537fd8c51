"""UltraFace and FastestDet in patches: tensors alive at once, and what the process holds at its peak.

The first count is from the graphs: tensors up to the last layer in patches, input included. The second is measured: a
child process runs these layers, its peak of resident memory is reset after a pass (`clear_refs`) and read after the
next; the highest of nine, less the least that it held between passes, and the input. onnxruntime and the allocator keep
no memory there. The patched network takes bytes, as a camera gives them, and normalises patch by patch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _box import SHARED, need, write_results

from edge_run.base.units import KIB
from edge_run.runtime.split.onnx_file import extract, read_onnx
from edge_run.runtime.split.patches import patch_network

VISION = SHARED / "data" / "vision"
NETWORKS = {
    "UltraFace": (VISION / "ultraface" / "version-RFB-320.onnx", ((127 / 255,), (128 / 255,))),
    "FastestDet": (VISION / "fastestdet" / "FastestDet.onnx", ((0.0,), (1.0,))),
}
_CHILD = """
import sys
import numpy as np
import onnxruntime

def figure(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
options.enable_cpu_mem_arena = options.enable_mem_pattern = options.enable_mem_reuse = False  # the least memory
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
value = session.get_inputs()[0]
dtype = np.uint8 if "uint8" in value.type else np.float32
sample = np.zeros([one if isinstance(one, int) else 1 for one in value.shape], dtype=dtype)
before, peaks = [], []
for _ in range(9):
    session.run(None, {value.name: sample})
    open("/proc/self/clear_refs", "w").write("5")
    before.append(figure("VmRSS"))
    session.run(None, {value.name: sample})
    peaks.append(figure("VmHWM"))
print((max(peaks) - min(before)) * 1024 + sample.nbytes)
"""


def measured_bytes(path: Path) -> int:
    """Return the peak of a pass through the network `path`, input included, in a process of its own."""
    prompt = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}  # what is freed goes back at once
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | prompt,
    )
    return int(done.stdout)


def main() -> None:
    """Patch, measure, and write the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    need(VISION)
    rows: list[dict[str, object]] = []
    lines = [
        __doc__ or "",
        "| network | up to | patches | again, % | tensors, KiB | patched | x | process, KiB | patched | x | differs |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for network, (path, pixels) in NETWORKS.items():
            report = patch_network(path, folder / "bytes.onnx", pixels=pixels, is_overwritten=True)
            measured = []
            for number, (source, ends) in enumerate(((path, report.last), (folder / "bytes.onnx", report.last))):
                model = read_onnx(source)
                part = folder / f"{number}.onnx"
                part.write_bytes(extract(model, None, ends).SerializeToString())
                measured.append(measured_bytes(part))
            before, after = report.prefix_peak_bytes, report.patched_prefix_peak_bytes
            floats = extract_peak(path, report.last)
            rows.append(
                {"network": network, "last": report.last, "patches": report.patches, "extra_share": report.extra_share,
                 "tensors_bytes": floats, "patched_tensors_bytes": after, "process_bytes": measured[0],
                 "patched_process_bytes": measured[1], "difference": report.difference, "with_bytes_bytes": before}
            )  # fmt: skip
            sizes = [f"{one / KIB:,.0f}" for one in (floats, after, *measured)]
            times = [f"{one / other:.1f}" for one, other in ((floats, after), (measured[0], measured[1]))]
            cells = (
                network, report.last, str(report.patches), f"{report.extra_share * 100:.1f}", *sizes[:2], times[0],
                *sizes[2:], times[1], f"{report.difference:.0e}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    print(*lines, sep="\n")
    write_results("split-patches", rows, "\n".join(lines))


def extract_peak(path: Path, last: str) -> int:
    """Return the bytes of tensors alive at once up to `last` in the network as it is."""
    return read_onnx(path).peak_bytes(end=last)


if __name__ == "__main__":
    main()
