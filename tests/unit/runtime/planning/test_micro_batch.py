"""How wide passes are: the width that is expected to be fastest, kept until another one gains more than a tenth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_samples import PROFILE
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError
from edge_run.base.units import MIB
from edge_run.runtime.planning import micro_batch
from edge_run.runtime.planning.micro_batch import WIDTHS, choose_micro_batch, widths

Costs = dict[int, float]  # by width; a negative one is the smallest budget that works, with which it is refused


@pytest.fixture
def asked() -> list[int]:
    """The widths that were prepared."""
    return []


@pytest.fixture
def chosen(tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the width that is chosen at given costs; a width of `easy` leaves nothing to gain.

    short: widths beside which the context that was asked for has no room. starved: those that leave few frames.
    """
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    gguf: Any = SimpleNamespace(shards=[SimpleNamespace(path=model)])

    def decide(
        costs: Costs,
        *,
        easy: int = 0,
        short: tuple[int, ...] = (),
        starved: tuple[int, ...] = (),
        is_disturbed: bool = False,
        **options: Any,
    ) -> int:
        asked.clear()

        def prepare(config: ModelConfig) -> Any:
            width = config.micro_batch_tokens
            asked.append(width)
            if costs[width] < 0:
                raise BudgetError("too small", minimum_bytes=int(-costs[width]))
            return SimpleNamespace(known=True, why_plain="", offload=None, width=width)

        def planned(prepared: Any) -> Any:
            tokens = 1000 if prepared.width in short else 4096
            budget = {"minimum_bytes": 1, "budget_bytes": 1 << 30}
            streamed = {"mode": "streamed", "model_bytes": 100 * MIB, "streamed_bytes_per_batch": 80 * MIB}
            window_bytes = (6 if prepared.width in starved else 18) * MIB
            place = {**streamed, "window_bytes": window_bytes, "expert_bytes": 0}
            tokens_of = {"context_tokens": tokens, "wanted_context_tokens": 4096}
            return SimpleNamespace(**budget, **place, **tokens_of, width=prepared.width)

        monkeypatch.setattr(micro_batch, "_planned", planned)
        monkeypatch.setattr(micro_batch, "text_s", lambda prepared, plan, n_tokens, width, profile: costs[width])
        monkeypatch.setattr(micro_batch, "_is_easy", lambda plan: plan.width == easy)
        config = ModelConfig(cache_folder=tmp_path / "cache", **options)
        profile = replace(PROFILE, is_disturbed=is_disturbed)
        found: Any = choose_micro_batch(gguf, config, prepare, lambda prepared: profile)
        return int(found.width)

    return decide


def test_the_fastest_is_chosen(chosen: Any) -> None:
    assert chosen({512: 9, 128: 7, 32: 8, 1: 30}) == 128


def test_buffers_do_not_shorten_the_context_where_narrower_passes_do_without(chosen: Any) -> None:
    """Passes of one token are the last resort: prompts take too long with them."""
    assert chosen({512: 5, 128: 7, 32: 8, 1: 30}, short=(512,)) == 128
    assert chosen({512: 5, 128: 7, 32: 8, 1: 30}, short=(512, 128)) == 32
    assert chosen({512: 5, 128: 7, 32: 8, 1: 30}, short=(512, 128, 32)) == 512
    assert chosen({512: 5, 128: 7, 32: 8, 1: 30}, short=(512, 128, 32, 1)) == 512


def test_buffers_do_not_take_the_window_of_many_answers(chosen: Any) -> None:
    costs = {512: 5, 128: 7, 32: 8, 1: 30}
    assert chosen(costs, starved=(512,), sequences=16) == 128
    assert chosen(costs, starved=(512, 128), sequences=16) == 32
    assert chosen(costs, starved=(512, 128, 32), sequences=16) == 512
    assert chosen(costs, starved=(512,)) == 512, "one answer computes little while it reads"


def test_where_there_is_nothing_to_gain_nothing_else_is_looked_at(chosen: Any, asked: list[int]) -> None:
    assert chosen({512: 9, 128: 1, 32: 1, 1: 1}, easy=512) == 512
    assert asked == [512]
    assert chosen({512: 9, 128: 1, 32: 1, 1: 1}, easy=512, memory="1GiB", is_disturbed=True) == 512
    assert chosen({512: 9, 128: 8.5, 32: 9, 1: 9}, memory="1GiB") == 512, "it was kept, as nothing measured decided it"


def test_a_choice_changes_for_more_than_a_tenth_only(chosen: Any) -> None:
    assert chosen({512: 9, 128: 7, 32: 8, 1: 30}, memory="1GiB") == 128
    assert chosen({512: 9, 128: 7.6, 32: 7, 1: 30}, memory="1GiB") == 128
    assert chosen({512: 7, 128: 7.6, 32: 9, 1: 30}, memory="1GiB", easy=512) == 128, "also where the widest is easy"
    assert chosen({512: 9, 128: 8, 32: 7, 1: 30}, memory="1GiB") == 32
    assert chosen({512: 9, 128: -5, 32: -5, 1: 30}, memory="1GiB") == 512, "what was chosen does not fit any more"


def test_what_was_measured_beside_other_programs_changes_no_choice(chosen: Any) -> None:
    assert chosen({512: 9, 128: 1, 32: 8, 1: 30}, is_disturbed=True) == 128
    assert chosen({512: 9, 128: 9, 32: 9, 1: 30}) == 512, "it was not kept"
    assert chosen({512: 9, 128: 7, 32: 8, 1: 30}) == 128
    assert chosen({512: 9, 128: 9, 32: 1, 1: 30}, is_disturbed=True) == 128
    assert chosen({512: 9, 128: 7, 32: 6.9, 1: 30}) == 128, "it was not kept"


@pytest.mark.parametrize("easy", [0, 512])
def test_the_usual_width_stays_too_whatever_a_disturbed_measurement_says(chosen: Any, easy: int) -> None:
    assert chosen({512: 7, 128: 7.5, 32: 8, 1: 30}, easy=easy) == 512
    assert chosen({512: 9, 128: 1, 32: 8, 1: 30}, is_disturbed=True) == 512
    assert chosen({512: 9, 128: 8.5, 32: 9, 1: 30}) == 512, "it changes for more than a tenth only"
    assert chosen({512: 9, 128: 8, 32: 9, 1: 30}) == 128


def test_each_budget_and_context_has_a_choice_of_its_own(chosen: Any) -> None:
    assert chosen({512: 9, 128: 7, 32: 8, 1: 30}, memory="1GiB") == 128
    assert chosen({512: 7, 128: 7.5, 32: 8, 1: 30}, memory="2GiB") == 512
    assert chosen({512: 7, 128: 7.5, 32: 8, 1: 30}, memory="1GiB", context_tokens=100) == 512
    assert chosen({512: 7, 128: 7.5, 32: 8, 1: 30}, memory="1GiB") == 128


def test_a_refusal_names_the_smallest_budget_of_all(chosen: Any) -> None:
    with pytest.raises(BudgetError) as refusal:
        chosen({512: -9, 128: -7, 32: -5, 1: -6})
    assert refusal.value.minimum_bytes == 5


def test_what_was_kept_may_be_anything(chosen: Any, tmp_path: Path) -> None:
    assert chosen({512: 9, 128: 7, 32: 8, 1: 30}) == 128
    (place,) = (tmp_path / "cache" / "micro-batch").iterdir()
    for content in (b"[]", b"{", b"\xff", b'{"x": 3}', place.read_bytes().replace(b"128", b'"128"')):
        place.write_bytes(content)
        assert chosen({512: 9, 128: 7, 32: 6.9, 1: 30}) == 32


@pytest.mark.parametrize("options", [{"exact": True}, {"speculate": "ngram"}, {"draft": "draft.gguf"}])
def test_passes_of_one_token_verify_nothing(options: dict[str, Any]) -> None:
    assert list(widths(ModelConfig(**options))) == [width for width in WIDTHS if width > 1]
    assert list(widths(ModelConfig())) == list(WIDTHS)
