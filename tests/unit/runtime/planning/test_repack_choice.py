"""For which widths of passes the kernels of weights are chosen, and which are left out for exactness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.llama import exact_kernels
from edge_run.runtime.llama.repacking import types_with_kernels
from edge_run.runtime.planning.repack_choice import _of_one, choose_kinds
from edge_run.tiers.gguf_format import TENSOR_TYPES
from edge_run.tiers.gguf_header import TensorInfo

Q4_0, Q4_K = ({kind.name: number for number, kind in TENSOR_TYPES.items()}[name] for name in ("Q4_0", "Q4_K"))
ODD_ROWS = 66  # which no kernel takes several at a time of


@pytest.mark.parametrize(
    ("width", "share", "tokens"),
    [(1, 1.0, 1), (512, 1.0, 512), (1, 0.0625, 1), (16, 0.0625, 2), (512, 0.0625, 32), (512, 1 / 512, 2)],
)
def test_each_expert_meets_some_of_the_tokens_of_a_pass(width: int, share: float, tokens: int) -> None:
    """Of those experts that any token uses: 16 tokens that use 8 of 128 each come to 82 experts."""
    assert _of_one(width, share) == tokens


def test_exact_leaves_out_only_kinds_with_an_uneven_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token table whose rows no kernel can take together says nothing of the weights that are of its kind."""
    weights = [
        (Q4_0, (256, 64)),
        (Q4_0, (256, ODD_ROWS)),
        (Q4_K, (256, 64)),
        (Q4_K, (256, ODD_ROWS)),
        (Q4_K, (512, 66)),
    ]
    tensors = [TensorInfo(str(i), shape, kind, 0, 0, 0) for i, (kind, shape) in enumerate([*weights, weights[0]])]
    gguf: Any = SimpleNamespace(tensors=tensors, used_experts=0)

    def is_kernel_even(type_id: int, shape: tuple[int, ...], *, by_expert: bool) -> bool | None:
        return None if shape[1] == ODD_ROWS else type_id == Q4_0

    monkeypatch.setattr(exact_kernels, "is_kernel_even", is_kernel_even)
    wanted, exact = (choose_kinds(gguf, ModelConfig(repack="on", exact=one)) for one in (False, True))
    assert {kind.partition("/")[0] for kind in wanted - exact} == {"Q4_K"}
    assert len(wanted - exact) == 1, "of the other nothing has a kernel"


@pytest.mark.skipif("Q4_0" not in types_with_kernels(), reason="no kernel for repacked weights on this processor")
def test_a_kernel_is_tried_once_for_weights_of_however_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, try_it = list[int](), exact_kernels._is_even

    def is_even(weight: Any, type_id: int, shape: tuple[int, int, int], *, by_expert: bool) -> bool:
        tried.append(shape[1])
        return try_it(weight, type_id, shape, by_expert=by_expert)

    monkeypatch.setattr(exact_kernels, "_is_even", is_even)
    found = [
        exact_kernels.is_kernel_even(Q4_0, (96, rows, 1), by_expert=False) for rows in (64, 128, 192, 64, ODD_ROWS)
    ]
    assert isinstance(found[0], bool)
    assert found == [found[0]] * 4 + [None]
    assert len(tried) == 1
