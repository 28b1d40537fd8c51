"""The models of a folder, as their headers describe them: names, sizes, and why a file is none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import ConfigError, EdgeRunError, ModelFileError, reason_of
from edge_run.base.files.texts import as_text
from edge_run.runtime.generation.chat import MOST_TEMPLATE_BYTES
from edge_run.runtime.inspection.embedding_shape import makes_embeddings
from edge_run.runtime.inspection.model_kind import check_kind
from edge_run.tiers.gguf import read_gguf

MOST_FILES = 10_000
MOST_LABEL_LETTERS = 256
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}(-of-\d{5}\.gguf)$")
_FIRST_SHARD = re.compile(r"-00001-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be asked for.

    name: what it is called. path: its file, or its first one. size_bytes: of its tensors. changed_ns: when the file was
    written. trained_context_tokens: 0 where the file does not say; chat_template: empty where it has none.
    makes_embeddings: whether it is made for vectors of texts.
    """

    name: str
    path: Path
    size_bytes: int = 0
    changed_ns: int = 0
    architecture: str = ""
    size_label: str = ""
    trained_context_tokens: int = 0
    chat_template: str = ""
    makes_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file that cannot be asked for. reason: why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What was found in a folder."""

    entries: tuple[ModelEntry, ...]
    left_out: tuple[LeftOutFile, ...] = ()


def read_folder(folder: Path) -> ModelFolder:
    """Return the models whose GGUF files lie in a folder, by name; the files of a split one are one model.

    A file that is broken, or is of no kind that can be served (`check_kind`), is left out with the reason. Raises
    ConfigError where the folder cannot be read.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError as error:
        raise ConfigError(f"--models {folder}: {reason_of(error)}; name a folder with GGUF files") from error
    if len(files) > MOST_FILES:
        raise ConfigError(f"--models {folder}: {len(files):,} files, {MOST_FILES:,} are the most")
    found = set(files)
    entries: dict[str, ModelEntry] = {}
    left_out: list[LeftOutFile] = []
    for file in files:
        if file.with_name(_LATER_SHARD.sub(r"-00001\1", file.name)) in found - {file}:
            continue
        try:
            entry = read_entry(file)
        except (EdgeRunError, OSError) as error:
            left_out.append(LeftOutFile(as_text(file.name), without_folder(str(error), file)))
            continue
        if entry.name in entries:
            other = as_text(entries[entry.name].path.name)
            left_out.append(LeftOutFile(as_text(file.name), f"{other} has this name already"))
        else:
            entries[entry.name] = entry
    return ModelFolder(tuple(entries.values()), tuple(left_out))


def model_name(path: Path) -> str:
    """Return what the model of a file is called: the file's name, of a split one what its files have in common."""
    return as_text(_FIRST_SHARD.sub("", path.stem))


def without_folder(message: str, path: Path) -> str:
    """Return what is said of a file, less the folder that it lies in: clients need not know it."""
    return as_text(message.replace(f"{path.parent}{os.sep}", ""))


def read_entry(path: Path) -> ModelEntry:
    """Return what the header of a model file says. Raises ModelFileError, NotSupported, TierReadError, OSError."""
    gguf = read_gguf(path)
    check_kind(gguf)
    trained, template = gguf.value("context_length"), _text(gguf.metadata.get("tokenizer.chat_template"))
    if len(template) > MOST_TEMPLATE_BYTES:  # it could not be opened, and is not kept meanwhile
        raise ModelFileError(
            f"{path}: its chat template has {len(template):,} characters, {MOST_TEMPLATE_BYTES:,} are the most"
        )
    return ModelEntry(
        model_name(path),
        path,
        gguf.data_bytes,
        max(shard.path.stat().st_mtime_ns for shard in gguf.shards),
        gguf.architecture,
        _text(gguf.metadata.get("general.size_label"))[:MOST_LABEL_LETTERS],
        trained if isinstance(trained, int) else 0,
        template,
        makes_embeddings(gguf),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
