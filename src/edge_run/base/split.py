"""What the split commands report: frozen dataclasses, whose field names are the keys of `--json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor at which a network can be cut in two, and what the halves take with a batch of one.

    shape: of the tensor.
    wire_bytes: of the tensor as it is, uncompressed.
    head_multiply_adds: before it.
    head_share: the same as a share of the network's.
    head_s, tail_s: median seconds here.
    head_peak_bytes: the most bytes of tensors alive at once before it.
    tail_peak_bytes: the same after it.
    difference: the largest between `tail(head(x))` and the uncut network, both as onnxruntime optimises them.
    is_exact: no bit differs where onnxruntime optimises neither.
    """

    tensor: str
    shape: tuple[int, ...]
    wire_bytes: int
    head_multiply_adds: int
    head_share: float
    head_s: float
    tail_s: float
    head_peak_bytes: int
    tail_peak_bytes: int
    difference: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class CutReport:
    """All cuts of a network, in order.

    whole_s: median seconds of the uncut network.
    threads: that computed it.
    """

    model: str
    multiply_adds: int
    whole_s: float
    whole_peak_bytes: int
    threads: int
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class RateReport:
    """One rate of a trained bottleneck, measured on images that training did not see.

    target_bytes: what was asked for.
    mean_bytes, largest_bytes: of the codes, headers included.
    agreement: the share of images with the uncut network's answer.
    accuracy: the share answered with the class of their folder; 0 where folders are no classes of the network.
    model_accuracy: the same by the uncut network.
    """

    target_bytes: int
    mean_bytes: float
    largest_bytes: int
    agreement: float
    accuracy: float
    model_accuracy: float


@dataclass(frozen=True, slots=True)
class TrainReport:
    """A trained bottleneck.

    folder: of its files.
    images: that it learned from.
    head_multiply_adds: of the device's part, encoder included.
    head_share: the same as a share of the uncut network's.
    head_bytes: of head.onnx.
    """

    folder: str
    images: int
    head_multiply_adds: int
    head_share: float
    head_bytes: int
    rates: tuple[RateReport, ...]


@dataclass(frozen=True, slots=True)
class FrameReport:
    """How a frame was answered.

    mode: `local`, `code N` (N is the rate), `image`, or `empty`, which sent nothing.
    sent_bytes: of the code or image, 0 for none.
    seconds: from pixels to answer.
    lost_server: the server did not answer, and the device did.
    interest: what the filter said, -1 without one.
    answer: the class with the highest value, where answers are classes, else -1.
    """

    mode: str
    sent_bytes: int
    seconds: float
    lost_server: bool
    interest: float
    answer: int


@dataclass(frozen=True, slots=True)
class SplitStats:
    """Frames since a SplitModel was opened, by how they were answered.

    server_losses: how often the server did not answer a frame; frames of its kind are then sent less often.
    refused: frames that the server refused, and the device computed; their kind is then sent less often.
    refusal: why, of the last of these.
    has_server: whether it is there now.
    round_trip_s, bytes_per_s: of the link, 0 before they are known.
    expected_s: of each mode by its name, how long a frame is expected to take now.
    """

    frames: int
    local: int
    code: int
    image: int
    empty: int
    sent_bytes: int
    server_losses: int
    refused: int
    refusal: str
    has_server: bool
    round_trip_s: float
    bytes_per_s: float
    expected_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A way to the answers.

    name: `code N`, `jpeg Q` or `webp Q`.
    mean_bytes, largest_bytes: sent for an image.
    """

    name: str
    mean_bytes: float
    largest_bytes: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class WayTime:
    """What a frame takes one way.

    name: `local`, `image` (as it is) or `code N`.
    device_s, server_s: median seconds of computing before and after the network, both on this machine.
    sent_bytes: mean.
    """

    name: str
    device_s: float
    server_s: float
    sent_bytes: float

    def latency_s(self, bytes_per_s: float) -> float:
        """Return the seconds from frame to answer over a link of that bandwidth, its round trip left out."""
        return self.device_s + self.sent_bytes / bytes_per_s + self.server_s


@dataclass(frozen=True, slots=True)
class SplitBench:
    """Bytes against accuracy.

    model_accuracy: of the uncut network on the images as they are.
    file_bytes: of those images on average.
    worst_overhead_bytes: the most that a code has beyond 1.05 times what its prior says it takes.
    ways: what a frame takes each way that it can go when it runs.
    """

    head: str
    data: str
    images: int
    model_accuracy: float
    file_bytes: float
    worst_overhead_bytes: float
    points: tuple[CurvePoint, ...]
    ways: tuple[WayTime, ...]


@dataclass(frozen=True, slots=True)
class PatchReport:
    """A network whose first layers, up to tensor `last`, run in patches.

    prefix_peak_bytes: the most bytes of tensors alive at once up to `last`, the input and `last` included.
    patched_prefix_peak_bytes: the same in patches.
    whole_peak_bytes, patched_peak_bytes: the same of the whole network.
    extra_share: of its multiply-adds, computed again.
    difference: the largest between its answers and those of the network as it was.
    """

    model: str
    last: str
    patches: int
    prefix_peak_bytes: int
    patched_prefix_peak_bytes: int
    whole_peak_bytes: int
    patched_peak_bytes: int
    extra_share: float
    difference: float
