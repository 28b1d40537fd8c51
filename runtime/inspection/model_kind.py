"""What kind of model a GGUF file is: said from the header, before llama.cpp is asked."""

from __future__ import annotations

from edge_run.base.errors import NotSupported
from edge_run.tiers.gguf import GgufModel

_GIVE_THE_MODEL = "give the model that it belongs to"
_GIVE_ANOTHER = "give a model that generates text"
_PROJECTOR = ("a projector for images or sound (mmproj), which edge-run does not read", _GIVE_THE_MODEL)
_DRAFT = ("the draft of another model, which does not run by itself", _GIVE_THE_MODEL)

_TYPES = {
    "mmproj": _PROJECTOR,
    "adapter": ("an adapter (LoRA), part of a model only", f"{_GIVE_THE_MODEL}, or merge the two"),
    "imatrix": ("an importance matrix, for quantising a model", _GIVE_THE_MODEL),
    "vocab": ("a vocabulary without a model", _GIVE_THE_MODEL),
}
_ARCHITECTURES = {
    "clip": _PROJECTOR,
    "imatrix": _TYPES["imatrix"],
    "controlvector": ("a control vector, which steers a model", _GIVE_THE_MODEL),
    "t5": ("a model with an encoder, edge-run runs decoder-only ones", _GIVE_ANOTHER),
    "wavtokenizer-dec": ("a decoder of sound, which makes no text", _GIVE_ANOTHER),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), _DRAFT),
    "t5encoder": ("the encoder of T5, which edge-run does not run", "give another model"),
}
_ENCODERS = frozenset(
    (
        "bert", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "eurobert",
        "gemma-embedding",
    )
)  # fmt: skip


def check_kind(gguf: GgufModel) -> None:
    """Raise NotSupported, with what the file is and what to give instead, unless it is a model of a known kind."""
    kind = gguf.metadata.get("general.type")
    found = _TYPES.get(str(kind)) or _ARCHITECTURES.get(gguf.architecture)
    if found is None and not gguf.tensors:
        found = _TYPES["vocab"]
    if found is not None:
        what, advice = found
        raise NotSupported(f"{gguf.shards[0].path}: {what}; {advice}")


def is_encoder(gguf: GgufModel) -> bool:
    """Return whether the model looks at a text as a whole and makes vectors of it, but no text."""
    return gguf.architecture in _ENCODERS


def check_generates(gguf: GgufModel) -> None:
    """Raise NotSupported for a model that makes no text."""
    if is_encoder(gguf):
        raise NotSupported(
            f"{gguf.shards[0].path}: an encoder, which makes embeddings and no text; use `edge-run embed`, or "
            f"{_GIVE_ANOTHER}"
        )


def check_decoder_only(gguf: GgufModel, has_encoder: bool, has_decoder: bool) -> None:
    """Raise NotSupported for a model that llama.cpp computes in two parts, an encoder before the decoder."""
    if has_encoder or not has_decoder:
        path = gguf.shards[0].path
        raise NotSupported(f"{path}: {gguf.architecture} has an encoder of its own; edge-run runs models without one")
