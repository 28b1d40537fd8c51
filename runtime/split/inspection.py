"""`edge-run split inspect`: every cut of an ONNX network, checked and timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge_run.base.split import Cut, CutReport
from edge_run.devices.host.machine import compute_threads
from edge_run.partition.cuts import multiply_adds, operations_between
from edge_run.runtime.split.onnx_file import OnnxModel, extract, read_onnx
from edge_run.runtime.split.onnx_session import is_identical, largest_difference, median_s, open_session, run_session


def inspect_cuts(path: Path, threads: int | None = None, show: Callable[[str], None] = lambda text: None) -> CutReport:
    """Return all single-tensor cuts of the ONNX network `path`: each one made, compared with the whole, and timed.

    show: told what is being done. Takes a second or so for each cut. Raises ModelFileError, NotSupported.
    """
    model = read_onnx(path)
    names = model.cuts
    sample = model.sample()
    whole = open_session(model.proto.SerializeToString(), str(path), threads)
    inspector = _Inspector(model, threads)
    cuts = []
    for number, name in enumerate(names):
        show(f"cut {number + 1} of {len(names)}: {name}")
        cuts.append(inspector.inspect(name))
    return CutReport(
        model=str(path),
        multiply_adds=model.multiply_adds,
        whole_s=median_s(lambda: run_session(whole, sample)),
        whole_peak_bytes=model.peak_bytes(),
        threads=compute_threads(threads),
        cuts=tuple(cuts),
    )


class _Inspector:
    """Makes, compares and times the cuts of one network."""

    def __init__(self, model: OnnxModel, threads: int | None) -> None:
        self._model, self._threads = model, threads
        self._sample = model.sample()
        self._sizes = model.sizes_bytes
        whole = model.proto.SerializeToString()
        self._wanted = {
            is_optimised: run_session(open_session(whole, str(model.path), threads, is_optimised), self._sample)
            for is_optimised in (False, True)
        }

    def inspect(self, name: str) -> Cut:
        """Return what the cut at tensor `name` gives."""
        model, network = self._model, self._model.network
        before = operations_between(network, None, name)
        heads, all_adds = multiply_adds(network, before), model.multiply_adds
        plain, _, _ = self._run(name, is_optimised=False)
        optimised, head_s, tail_s = self._run(name, is_optimised=True)
        return Cut(
            tensor=name,
            shape=model.shapes[name],
            wire_bytes=self._sizes[name],
            head_multiply_adds=heads,
            head_share=heads / all_adds if all_adds else 0.0,
            head_s=head_s,
            tail_s=tail_s,
            head_peak_bytes=model.peak_bytes(end=name) if before else self._sizes[name],
            tail_peak_bytes=model.peak_bytes(start=name),
            difference=largest_difference(optimised, self._wanted[True]),
            is_exact=is_identical(plain, self._wanted[False]),
        )

    def _run(self, name: str, *, is_optimised: bool) -> tuple[list[object], float, float]:
        """Return the outputs of both halves in turn, and the seconds of each; 0 where nothing is optimised."""
        label = f"{self._model.path}, cut at {name}"
        between, head_s = self._sample, 0.0
        if name != self._model.input_name:
            head = open_session(
                extract(self._model, None, name).SerializeToString(), label, self._threads, is_optimised
            )
            between = run_session(head, self._sample)[0]
            head_s = median_s(lambda: run_session(head, self._sample)) if is_optimised else 0.0
        tail = open_session(extract(self._model, name, None).SerializeToString(), label, self._threads, is_optimised)
        tail_s = median_s(lambda: run_session(tail, between)) if is_optimised else 0.0
        return run_session(tail, between), head_s, tail_s
