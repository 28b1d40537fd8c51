"""What a context has lost comes back from the prompt cache, in the same process too."""

from pathlib import Path

import pytest

from in_child import in_child
from kept_prompts import TOKENS, opened, same, talk, talks
from tiny_models import make_model


@pytest.mark.parametrize("name", ["gemma3", "mamba"])
@in_child
def test_what_a_context_that_cannot_be_cut_has_lost_comes_back_from_disk(
    name: str, folder: Path, tmp_path: Path
) -> None:
    """It had more of the prompt than is kept, until it was emptied."""
    path = make_model(name, folder)
    (wanted,) = talks(path, None, TOKENS[:350])
    with opened(path, tmp_path / "kept") as (session, keeper, said):
        found = [session.feed(TOKENS[:length])[1] for length in (350, 900)]
        assert keeper
        keeper.flush()  # rows that are cut before they are written are written never
        again = talk(session, TOKENS[:350])
        assert [*found, again[1]] == [0, 350, 320]
        assert same(again, wanted)
        assert not said
