"""Training a bottleneck: small networks, small images, seconds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from edge_run.base.errors import BudgetError, ConfigError, ModelFileError, NotSupported, TierReadError
from edge_run.base.split import TrainReport
from edge_run.partition import latent_codec
from edge_run.partition.latent_codec import LatentCodec, fit_rate_to_size
from edge_run.runtime.split import bottleneck, onnx_torch, training
from edge_run.runtime.split import train as split_train
from edge_run.runtime.split.bottleneck import BottleneckShape
from edge_run.runtime.split.bundle import read_bundle
from edge_run.runtime.split.model import SplitModel
from edge_run.runtime.split.onnx_session import open_session, run_session
from edge_run.runtime.split.patches import patch_network
from edge_run.runtime.split.train import TrainTask, train_split
from edge_run.runtime.split.training import Student, train
from split_training import RATES, config
from vision_models import CUT, SHAPE, convolution, make_images, make_pixels, residual_network, save, weight

# PyTorch takes more than a second to load: not where others only collect these tests.
pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch: `make torch`"),
    pytest.mark.usefixtures("traced_here"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images") / "all", per_class=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return residual_network(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path, images: Path) -> tuple[Path, TrainReport]:
    out = tmp_path_factory.mktemp("out") / "split"
    task = TrainTask(model, images, CUT, out, empty=("class3",), most_missed=0.05)
    return out, train_split(task, config(feature_epochs=1, answer_epochs=12, learning_rate=2e-3))


def test_an_operator_that_is_not_known_is_named(tmp_path: Path, images: Path) -> None:
    nodes = [convolution("input", "stem"), helper.make_node("Erf", ["stem"], ["end"])]
    path = save(tmp_path, "odd", nodes, [weight("stem.w", 8, 3, 3, 3)], {"end": ["N", 8, 16, 16]})
    with pytest.raises(NotSupported, match="operators Erf"):
        train_split(TrainTask(path, images, "stem", tmp_path / "out"), config())
    assert not (tmp_path / "out").exists()


def test_what_pytorch_computes_in_another_way_is_not_trained(tmp_path: Path, images: Path) -> None:
    nodes = [
        convolution("input", "stem"),
        helper.make_node("MaxPool", ["stem"], ["pool"], kernel_shape=[3, 3], dilations=[2, 2]),
        helper.make_node("GlobalAveragePool", ["pool"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["end"]),
    ]
    large = helper.make_node("Mul", ["stem", "thousand"], ["large"])  # beside which the other answer is next to nothing
    weights = [weight("stem.w", 8, 3, 3, 3), onnx.numpy_helper.from_array(np.float32(1000), "thousand")]
    for name, more, outputs in (("apart", [], {}), ("beside", [large], {"large": ["N", 8, 16, 16]})):
        path = save(tmp_path, name, [*nodes, *more], weights[: 1 + len(more)], {"end": ["N", 8], **outputs})
        with pytest.raises(NotSupported, match="does not compute it as onnxruntime does"):
            train_split(TrainTask(path, images, "stem", tmp_path / "out"), config())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("count", "epochs", "steps"), [(3, 2, 2), (3, 0.1, 1), (40, 2, 10)])
def test_few_images_are_learned_from_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, epochs: float, steps: int
) -> None:
    """With fewer images than a batch has, and with the ten steps at which PyTorch divides by zero."""
    monkeypatch.setattr(split_train, "HELD_OUT_SHARE", 0.0)
    few, said, heads = make_images(tmp_path / "few", per_class=count), [], []
    for number in (0, epochs):
        task = TrainTask(model, few, CUT, tmp_path / str(number))
        train_split(task, config(answer_epochs=number, batch=32), said.append)
        heads.append((tmp_path / str(number) / "head.onnx").read_bytes())
    assert any(line.startswith(f"answers: step {steps} of {steps},") for line in said)
    assert heads[0] != heads[1]


def test_a_cut_that_is_refused_costs_no_pass(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_train, "run_session", lambda *_: pytest.fail("nothing needs to be computed"))
    for halvings, reason in ((5, "cannot be halved 5 times"), (4, "patches of 2,048 values")):
        monkeypatch.setattr(bottleneck, "MOST_PATCH_VALUES", 1024)
        with pytest.raises(ConfigError, match=reason):
            train_split(TrainTask(model, images, CUT, tmp_path), config(shape=BottleneckShape(halvings)))


def test_the_transform_holds_one_batch_at_a_time() -> None:
    generator, held, shape = np.random.default_rng(0), [], (1, 2, 8, 8)
    many = (generator.normal(size=(60, *shape[1:])) + 100).astype(np.float32)

    def batches() -> Iterator[np.ndarray]:
        for start in range(0, 60, 10):
            batch = many[start : start + 10].copy()
            held.append(weakref.ref(batch))
            yield batch
            assert sum(one() is not None for one in held) == 1

    whole = bottleneck.find_transform(SHAPE, CUT, shape, [many])
    parts = bottleneck.find_transform(SHAPE, CUT, shape, batches())
    patches = many.reshape(60, 2, 2, 4, 2, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 32)
    wanted = np.sqrt(np.linalg.eigvalsh(np.cov(patches, rowvar=False))[::-1])
    for one in (whole, parts):
        assert np.allclose(one.deviations, wanted[:24], rtol=1e-3)
        assert np.allclose(one.mean.reshape(-1), patches.mean(0), rtol=1e-5)


def test_latents_are_counted_on_as_many_images_as_memory_is_for(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def fit(tensors: np.ndarray, *rest: Any) -> Any:
        counted.append(len(tensors))
        return fit_rate_to_size(tensors, *rest)

    monkeypatch.setattr(split_train, "fit_rate_to_size", fit)
    monkeypatch.setattr(split_train, "SAMPLE_BYTES", 50 * 24 * 4 * 4 * 4)
    train_split(TrainTask(model, images, CUT, tmp_path), config())
    assert counted == [50] * len(RATES)


def test_images_without_a_code_count_as_answered_wrongly(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a training: what it learned is written, whatever single images are like."""
    most_bytes = 36
    monkeypatch.setattr(latent_codec, "MOST_PAYLOAD_BYTES", most_bytes)
    monkeypatch.setattr(split_train, "MOST_PAYLOAD_BYTES", most_bytes)
    (lowest, *_) = train_split(TrainTask(model, images, CUT, tmp_path), config()).rates
    measured = read_bundle(tmp_path).code.rates[0]
    monkeypatch.undo()
    head = open_session((tmp_path / "head.onnx").read_bytes(), "head", 1)
    rate = LatentCodec("", "", (measured.rate,))
    order = np.random.default_rng(0).permutation(400)[: measured.images]
    paths = sorted(images.rglob("*.jpg"))
    latents = run_session(head, np.stack([_pixels(paths[one]) for one in order]))[0]
    long = [len(rate.encode(one.reshape(rate.channels, -1), 0)) > most_bytes + 7 for one in latents]
    assert 0 < sum(long) < measured.images
    assert lowest.largest_bytes >= most_bytes
    assert lowest.agreement <= 1 - sum(long) / measured.images


def pre_activated_network(folder: Path) -> Path:
    """A normalisation after the cut, that no convolution can take in, and weights that are facts: they do not learn."""
    nodes = [
        convolution("input", "stem"),
        helper.make_node("BatchNormalization", ["stem", "s", "b", "m", "v"], ["even"]),
        helper.make_node("Relu", ["even"], ["bent"]),
        helper.make_node("GlobalAveragePool", ["bent"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["end"]),
    ]
    spread = onnx.numpy_helper.from_array(np.full(8, 2, np.float32), "v")
    weights = [weight("stem.w", 8, 3, 3, 3), *(weight(name, 8) for name in "sbm"), spread]
    return save(folder, "pre", nodes, weights, {"end": ["N", 8]})


def test_a_normalisation_learns_its_scale_and_bias_and_keeps_what_it_counted(tmp_path: Path, images: Path) -> None:
    path, out = pre_activated_network(tmp_path), tmp_path / "out"
    train_split(TrainTask(path, images, "stem", out, most_images=80), config(answer_epochs=1))
    before, after = (
        {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(str(file)).graph.initializer}
        for file in (path, out / "tail.onnx")
    )
    assert [name for name in "sbmv" if np.array_equal(before[name], after[name])] == ["m", "v"]


def test_what_has_no_gradient_is_refused_before_the_training(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_train, "find_transform", lambda *_: pytest.fail("it cannot be trained"))
    monkeypatch.setattr(onnx_torch, "_FACTS", {})
    with pytest.raises(NotSupported, match=r"PyTorch computes it, but cannot train it .*running_mean"):
        train_split(TrainTask(pre_activated_network(tmp_path), images, "stem", tmp_path / "out"), config())


def test_a_training_that_diverges_ends_at_that_step(model: Path, images: Path, tmp_path: Path) -> None:
    said: list[str] = []
    task = TrainTask(model, images, CUT, tmp_path / "out", most_images=80)
    with pytest.raises(NotSupported, match=r"answers: the training diverged at step [1-5] of 238; check that --mean"):
        train_split(task, config(answer_epochs=100, learning_rate=1.0, rate_weight=1e38), said.append)
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_are_refused_before_the_training(tmp_path: Path, images: Path) -> None:
    nodes = [
        convolution("input", "stem"),
        helper.make_node("Exp", ["stem"], ["large"]),
        helper.make_node("GlobalAveragePool", ["large"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["end"]),
    ]
    path = save(tmp_path, "large", nodes, [weight("stem.w", 8, 3, 3, 3)], {"end": ["N", 8]})
    with pytest.raises(
        NotSupported, match=r"\.jpg: the network makes numbers that are not finite of it; check --mean and --std"
    ):
        train_split(TrainTask(path, images, "large", tmp_path / "out"), config(deviation=(1e-4,)))


@pytest.mark.parametrize("outputs", ["classes", "values"])
def test_a_batch_in_parts_teaches_what_the_whole_batch_does(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: str
) -> None:
    """With 37 images at once of 64, in both stages: no image, and nothing known of all of them, is lost or doubled."""
    if outputs == "values":
        nodes = [convolution("input", "stem"), helper.make_node("Tanh", ["stem"], ["end"])]
        weights = [weight("stem.w", 8, 3, 3, 3)]
        model = save(tmp_path, "values", nodes, weights, {"end": ["N", 8, 16, 16]})
    learned: list[list[np.ndarray]] = []

    def note(student: Student, chosen_images: Any, chosen: Any, config: Any, at_once: int, show: Any) -> None:
        train(student, chosen_images, chosen, config, parts, show)
        parameters = [*student.encoder.weights.values(), *student.quantiser.parameters()]
        learned.append([one.detach().numpy().copy() for one in parameters])

    monkeypatch.setattr(split_train, "train", note)
    monkeypatch.setattr(training, "mixed_precision", contextlib.nullcontext)
    for parts in (64, 37):
        task = TrainTask(model, images, CUT, tmp_path / str(parts), most_images=80)
        train_split(task, config(batch=64, feature_epochs=1, answer_epochs=1))
    for whole, in_parts in zip(*learned, strict=True):
        assert np.allclose(whole, in_parts, rtol=1e-2, atol=1e-4)


def test_a_training_keeps_its_budget_or_says_what_works(
    model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(memory: int, name: str) -> int:
        found: list[int] = []
        monkeypatch.setattr(split_train, "train", lambda *rest: found.append(rest[4]))
        train_split(TrainTask(model, images, CUT, tmp_path / name), config(memory_bytes=memory))
        return found[0]

    monkeypatch.setattr(split_train, "process_memory", lambda: SimpleNamespace(held_bytes=0))  # which changes
    with pytest.raises(BudgetError, match=r"residual\.onnx: training takes .* at least.*raise --memory") as found:
        at_once(1 << 16, "none")
    least = found.value.minimum_bytes
    assert 2 <= at_once(least, "least") < 32
    assert at_once(least + (1 << 30), "most") == 32


def test_codes_have_the_bytes_that_were_asked_for(trained: tuple[Path, TrainReport]) -> None:
    _, report = trained
    for rate, wanted in zip(report.rates, RATES, strict=True):
        assert rate.mean_bytes <= wanted * 1.1 + 2
    sizes = [rate.mean_bytes for rate in report.rates]
    assert sizes == sorted(sizes)


def logits(folder: Path, mode: str, pixels: np.ndarray) -> np.ndarray:
    """Return the answers of a bundle's networks for pixels: uncut (`local`), or from the codes of a rate."""
    bundle = read_bundle(folder)
    if mode == "local":
        return run_session(open_session(bundle.checked("model.onnx"), "model", 1), pixels)[0]
    latents = run_session(open_session(bundle.checked("head.onnx"), "head", 1), pixels)[0]
    codes = [bundle.codec.encode(one.reshape(bundle.codec.channels, -1), int(mode)) for one in latents]
    decoded = np.stack([bundle.codec.decode(one, bundle.positions)[0] for one in codes]).reshape(latents.shape)
    return run_session(open_session(bundle.checked("tail.onnx"), "tail", 1), decoded)[0]


def log_shares(values: np.ndarray) -> np.ndarray:
    """Return the logarithms of the probabilities that logits (n, classes) stand for."""
    return values - np.log(np.exp(values).sum(1, keepdims=True))


def test_training_brings_answers_nearer_to_the_uncut_networks(
    trained: tuple[Path, TrainReport], model: Path, images: Path, tmp_path: Path
) -> None:
    train_split(TrainTask(model, images, CUT, tmp_path), config())
    pixels = np.stack([_pixels(path) for path in sorted(images.rglob("*.jpg"))[::5]])
    for rate in ("0", "1"):
        errors = []
        for folder in (tmp_path, trained[0]):
            wanted, found = (log_shares(logits(folder, mode, pixels)) for mode in ("local", rate))
            errors.append(float((np.exp(wanted) * (wanted - found)).sum(1).mean()))
        assert errors[1] < errors[0]


def _pixels(path: Path) -> np.ndarray:
    from edge_run.runtime.split.images import ImageSize, read_image

    return read_image(path, ImageSize(3, 16, 16))


def test_the_uncut_network_is_kept(trained: tuple[Path, TrainReport], model: Path) -> None:
    pixels = make_pixels(3)
    wanted = run_session(open_session(str(model), "model", 1), ((pixels / 255 - 0.4) / 0.25).astype(np.float32))[0]
    assert np.allclose(logits(trained[0], "local", pixels), wanted, atol=1e-4)


def test_the_filter_holds_back_what_is_empty(trained: tuple[Path, TrainReport], images: Path) -> None:
    head = trained[0] / "head.onnx"
    (measured,) = read_bundle(head).code.filters
    assert measured.interesting + measured.empty == 20
    modes: dict[str, list[str]] = {"class0": [], "class3": []}
    with SplitModel(head, use_filter=True, threads=1) as split:
        for name, found in modes.items():
            for path in sorted((images / name).glob("*.jpg"))[:40]:
                frame = split.run(path)
                found.append(frame.report.mode)
                assert bool(frame.outputs) == (frame.report.mode != "empty")
                assert 0 <= frame.report.interest <= 1
    assert modes["class0"].count("empty") <= 8
    assert modes["class3"].count("empty") >= 20


def test_the_same_seed_gives_the_same_files(model: Path, images: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train_split(TrainTask(model, images, CUT, tmp_path / name), config(answer_epochs=0.2))
    for file in ("head.onnx", "tail.onnx", "code.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_an_older_operator_set_is_converted(tmp_path: Path, images: Path) -> None:
    nodes = [
        convolution("input", "stem"),
        helper.make_node("Clip", ["stem"], ["kept"], min=-1.0, max=1.0),
        helper.make_node("GlobalAveragePool", ["kept"], ["mean"]),
        helper.make_node("Squeeze", ["mean"], ["logits"], axes=[2, 3]),
    ]
    path = save(tmp_path, "old", nodes, [weight("stem.w", 8, 3, 3, 3)], {"logits": ["N", 8]}, opset=9)
    report = train_split(TrainTask(path, images, "input", tmp_path / "out"), config(answer_epochs=0.2))
    assert report.rates[-1].agreement > 0


def test_a_network_in_patches_is_trained(tmp_path: Path, images: Path) -> None:
    nodes = [
        convolution("input", "stem"),
        helper.make_node("Relu", ["stem"], ["bent"]),
        convolution("bent", "small", strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["small"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["end"]),
    ]
    weights = [weight("stem.w", 8, 3, 3, 3), weight("small.w", 8, 8, 3, 3)]
    whole, patched = save(tmp_path, "whole", nodes, weights, {"end": ["N", 8]}), tmp_path / "patched.onnx"
    out = tmp_path / "out"
    last = patch_network(whole, patched, tiles=2).last
    train_split(TrainTask(patched, images, last, out), config())
    for name in ("head.onnx", "model.onnx"):
        assert sum(node.op_type == "Slice" for node in onnx.load(str(out / name)).graph.node) == 4
    with SplitModel(out / "head.onnx", threads=1) as split:
        assert split.run(make_pixels(1)[0]).report.mode == "local"


def test_refusals(model: Path, images: Path, tmp_path: Path) -> None:
    def attempt(out: str = "out", data: Path = images, cut: str = CUT, **options: object) -> None:
        empty = options.pop("empty", ())
        train_split(TrainTask(model, data, cut, tmp_path / out, empty=empty), config(**options))  # type: ignore[arg-type]

    (tmp_path / "file").write_text("x")
    (tmp_path / "nothing").mkdir()
    make_images(tmp_path / "some", per_class=5)
    (tmp_path / "some" / "class0" / "999.jpg").write_bytes(b"no image")
    for options, kind, reason in (
        ({"data": tmp_path / "nothing"}, ConfigError, "holds no images"),
        ({"data": tmp_path / "none"}, ConfigError, "is no folder"),
        ({"data": tmp_path / "some", "answer_epochs": 20}, ModelFileError, r"999\.jpg.*no image"),
        ({"cut": "inner"}, ConfigError, "no single-tensor cut"),
        ({"cut": "flat"}, ConfigError, "needs .batch, channels, height, width"),
        ({"out": "file"}, ConfigError, "is no folder"),
        ({"empty": ("class9",)}, ConfigError, "class9: no folder"),
        ({"rates_bytes": (100, 50)}, ConfigError, "ascending"),
        ({"threads": -3}, ConfigError, "threads -3: must be 1 to 512"),
        ({"seed": -1}, ConfigError, "seed -1: must be 0 to"),
        ({"seed": 1 << 64}, ConfigError, "seed 18446744073709551616: must be 0 to"),
        ({"mean": (0.1, 0.2)}, ConfigError, "--mean"),
        ({"deviation": (0.0,)}, ConfigError, "--std 0.0: must be 1 or 3 numbers of 0.0001 to 10000"),
        ({"deviation": (1e-30,)}, ConfigError, "--std 1e-30: must be"),
    ):
        with pytest.raises(kind, match=reason):
            attempt(**options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    with pytest.raises(TierReadError):
        train_split(TrainTask(model, images, CUT, Path("/proc/split")), config())
