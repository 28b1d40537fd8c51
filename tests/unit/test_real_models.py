"""Which real models are known: CONTRIBUTING.md names them all, and what is missing or another file is said."""

from __future__ import annotations

from pathlib import Path

import pytest

import real_models
from real_models import MODELS, SMOLLM2, Missing, RealModel, WrongFile, find

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_table_has_the_model(model: RealModel) -> None:
    assert f"| `{model.file_name}` | {model.what} | `{model.sha256}` |" in CONTRIBUTING.read_text(encoding="utf-8")


def test_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(real_models.VARIABLE, raising=False)
    with pytest.raises(Missing, match="names no folder of real models"):
        find(SMOLLM2)


def test_a_file_that_is_missing_wrong_or_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(real_models.VARIABLE, str(tmp_path))
    with pytest.raises(Missing, match=r"smollm2-135m\.gguf: not there"):
        find(SMOLLM2)
    (tmp_path / SMOLLM2.file_name).write_bytes(b"other")
    with pytest.raises(WrongFile, match="its SHA-256 is d9298a10"):
        find(SMOLLM2)
    empty = RealModel("empty", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "nothing")
    (tmp_path / "empty.gguf").touch()
    assert find(empty) == tmp_path / "empty.gguf"
