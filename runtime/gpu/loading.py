"""How the bytes of a model get to where an offload has them: some to a GPU, all others under our memory.

llama.cpp uploads what is mapped when it loads. Of a stub that is nothing yet: it is given zeros, which take no memory,
and the bytes themselves follow in large direct reads, past the page cache and without a copy that stays in DRAM.
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
    """Load `gguf` without its weights; return where in memory those are to be that the processor reads.

    load: makes the model of paths, a callback for when its header is read, and one for before the first upload.
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
    """Return where in the machine's memory the tensors of `model` lie: (address, length)."""
    on_host = filter(ggml.is_on_host, ggml.model_tensors(model.handle))
    return [(ggml.tensor_at(tensor).data, ggml.functions().ggml_nbytes(tensor)) for tensor in on_host]


def host_weights(model: LlamaModel) -> dict[bytes, WeightRead]:
    """Return the tensors of `model` that are in the machine's memory by name, as a GPU reads copies of them."""
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
    """Return the upload of the tensors of `model` that are on `gpu`, which has begun to read. check: as of `Upload`."""
    places = {tensor.name: tensor for tensor in gguf.tensors}
    extents = []
    for tensor in gpu_tensors(model):
        place = places[ggml.tensor_name(tensor).decode("utf-8", "replace")]
        extents.append(Extent(tensor, place.shard, place.offset, place.size_bytes))
    return Upload(extents, sources, readers, _put, open_staging(gpu, sources[0]), check)


def _put(piece: Extent, address: int) -> None:
    ggml.set_tensor(piece.tensor, address, piece.offset, piece.length)
