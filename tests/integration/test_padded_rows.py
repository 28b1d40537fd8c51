"""Logits of padding tokens are kept nowhere: passes with padding write the others to the one array of a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.protocols import BatchToken
from edge_run.runtime.llama.logit_rows import LogitRows
from in_child import in_child
from small_engines import PROMPT, open_engine
from tiny_models import make_model


@pytest.mark.parametrize("options", [{"exact": True, "sequences": 3}, {"kv_spill": "on", "sequences": 3}])
@in_child
def test_a_padded_pass_has_no_array_of_its_own(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with open_engine(make_model("llama", folder), **options, cache_folder=tmp_path) as engine:
        decoder = engine.decoder
        batch = [BatchToken(PROMPT[i], i, 0, i == 3) for i in range(4)] + [BatchToken(PROMPT[0], 0, 2, True)]
        alone = [decoder.decode([BatchToken(t.token, t.position, t.sequence, t.wants_logits)]).copy() for t in batch]
        for sequence in (0, 2):
            decoder.rewind(sequence, 0)
        whole = decoder.decode(batch[:4])
        assert np.array_equal(whole[0], alone[3][0]) or "exact" not in options, "of a prompt that is read anew"
        decoder.rewind(0, 0)

        def refuse(self: LogitRows, n_rows: int) -> None:
            raise AssertionError(f"memory for {n_rows} rows more")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogitRows, "_new", refuse)
            rows = decoder.decode(batch)
        assert np.allclose(rows[0], alone[3][0], atol=0.05)
        assert np.allclose(rows[1], alone[4][0], atol=0.05)
        assert not np.allclose(rows[0], rows[1], atol=0.05)
