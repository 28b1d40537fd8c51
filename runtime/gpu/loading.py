"""Loads a model of which a part goes to a GPU, and the rest to our memory.

llama.cpp uploads the mapped file while it loads. A stub has no data, so llama.cpp is given zeros, which take no memory.
The weights follow in large direct reads, past the page cache, and no copy of them stays in DRAM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_run.runtime.gpu.devices import Gpu, open_staging
from edge_run.runtime.graph.nodes import WeightRead
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel
from edge_run.tiers.address_space import AddressSpace, MappedSpan, clipped
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.readers import Readers
from edge_run.tiers.source import SourceFile
from edge_run.tiers.stub import Stubs
from edge_run.tiers.upload import Extent, Upload


def load_stubs(gguf: GgufModel, load: Callable[..., LlamaModel]) -> tuple[list[MappedSpan], LlamaModel]:
    """Load `gguf` without its weights; return the spans of the weights that the processor reads, and the model.

    load: makes the model from the paths, a callback after its header is read, and a callback before the first upload.
    """
    mapped: list[MappedSpan] = []

    def map_zeros() -> None:
        mapped.extend(stubs.spans())
        AddressSpace(mapped).map_zeros()

    with Stubs(gguf.shards) as stubs:
        model = load(stubs.paths, stubs.cut, map_zeros)
        return (clipped(mapped, host_ranges(model)) if mapped else stubs.spans()), model


def gpu_tensors(model: LlamaModel) -> Sequence[int]:
    """Return the tensors of `model` that are not in the machine's memory."""
    return [tensor for tensor in ggml.model_tensors(model.handle) if not ggml.is_on_host(tensor)]


def host_ranges(model: LlamaModel) -> list[tuple[int, int]]:
    """Return (address, length) of the tensors of `model` in the machine's memory."""
    on_host = filter(ggml.is_on_host, ggml.model_tensors(model.handle))
    return [(ggml.tensor_at(tensor).data, ggml.functions().ggml_nbytes(tensor)) for tensor in on_host]


def host_weights(model: LlamaModel) -> dict[bytes, WeightRead]:
    """Return, by name, the tensors of `model` in the machine's memory, as reads of the copies that a GPU gets."""
    nbytes, found = ggml.functions().ggml_nbytes, {}
    for tensor in filter(ggml.is_on_host, ggml.model_tensors(model.handle)):
        name = ggml.tensor_name(tensor)
        text = name.decode("utf-8", "replace")
        found[name] = WeightRead(text, ggml.tensor_at(tensor).data, nbytes(tensor), is_copied=True)
    return found


def open_upload(
    model: LlamaModel,
    gguf: GgufModel,
    sources: Sequence[SourceFile],
    readers: Readers,
    gpu: Gpu,
    check: Callable[[], None],
) -> Upload:
    """Return the upload, which has begun to read, of the tensors of `model` on `gpu`. check: see `Upload`."""
    places = {tensor.name: tensor for tensor in gguf.tensors}
    extents = []
    for tensor in gpu_tensors(model):
        place = places[ggml.tensor_name(tensor).decode("utf-8", "replace")]
        extents.append(Extent(tensor, place.shard, place.offset, place.size_bytes))
    return Upload(extents, sources, readers, _put, open_staging(gpu, sources[0]), check)


def _put(piece: Extent, address: int) -> None:
    ggml.set_tensor(piece.tensor, address, piece.offset, piece.length)
