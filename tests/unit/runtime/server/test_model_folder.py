"""The models of a folder: which files are models, what they are called, and what is kept of each."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from edge_run.base.errors import ConfigError, ModelFileError
from edge_run.runtime.server.catalogue.folder import ModelEntry, read_entry, read_folder
from edge_run.tiers.gguf import read_gguf
from kit_models import KIT


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    shutil.copy(KIT, tmp_path / "kit.gguf")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("no model " * 100)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "cut-00002-of-00003.gguf").write_bytes(KIT.read_bytes()[:5000])
    found = read_folder(tmp_path)
    (entry,) = found.entries
    assert (entry.name, entry.path, entry.architecture) == ("kit", tmp_path / "kit.gguf", "llama")
    assert entry.size_bytes > 1e6
    assert sorted(file.file for file in found.left_out) == ["cut-00002-of-00003.gguf", "empty.gguf", "text.gguf"]
    assert all(file.reason and str(tmp_path) not in file.reason for file in found.left_out)
    with pytest.raises(ConfigError, match="--models"):
        read_folder(tmp_path / "nowhere")


def test_files_whose_names_are_no_text_have_names_that_are(tmp_path: Path) -> None:
    shutil.copy(KIT, tmp_path / os.fsdecode(b"mod\xe9le.gguf"))
    (tmp_path / os.fsdecode(b"emp\xffty.gguf")).touch()
    found = read_folder(tmp_path)
    assert [entry.name for entry in found.entries] == ["mod\ufffdle"]
    assert msgspec.json.encode([(file.file, file.reason) for file in found.left_out])
    assert found.left_out[0].file == "emp\ufffdty.gguf"


def test_a_template_that_no_model_could_have_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a size label of megabytes, which each list of the models would have."""
    found = read_gguf(KIT)

    def read(template: int, label: int) -> ModelEntry:
        words = {"tokenizer.chat_template": "x" * template, "general.size_label": "y" * label}
        changed = dataclasses.replace(found, metadata={**found.metadata, **words})
        monkeypatch.setattr("edge_run.runtime.server.catalogue.folder.read_gguf", lambda path: changed)
        return read_entry(KIT)

    assert len(read(1 << 20, 1 << 20).size_label) == 256
    with pytest.raises(ModelFileError, match="chat template"):
        read((1 << 20) + 1, 1)
