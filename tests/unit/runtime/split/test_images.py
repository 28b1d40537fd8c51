"""Folders of images, whose names are classes."""

from __future__ import annotations

from pathlib import Path

from edge_run.runtime.split.images import ImageFolder, ImageSize


def test_classes_keep_their_numbers_where_only_some_images_are_taken(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").touch()
    some = ImageFolder(tmp_path, ImageSize(3, 8, 8), most=2)
    assert some.classes == ["ant", "bee", "cat", "dog"]
    assert [path.parent.name for path in some.paths] == [some.classes[label] for label in some.labels] == ["ant", "cat"]
