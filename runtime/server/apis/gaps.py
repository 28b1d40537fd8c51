"""Gaps in a text, as in the code of an editor: prompts for models that were made to fill them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from edge_run.runtime.generation.model import Model
from edge_run.runtime.llama.prompt_text import GapMarks, check_room
from edge_run.runtime.server.refusals import Refusal

NEAR_TOKENS = 2048  # of what is before and behind a gap, as with llama-server: three quarters and one
USUAL_ANSWER_TOKENS = 256  # that are kept free where a request says no number
MOST_NAME_LETTERS = 4096
MOST_LETTERS = 1 << 20  # to be turned into tokens at a time, which takes some 70 bytes for each
_LETTERS_OF_A_TOKEN = 32  # at most, nearly always: so much of a text is turned into tokens
_PROJECT, _FILE = "myproject\n", "filename\n"  # llama-server's names of what has none
_SNIPPET = "\n\n--- snippet ---\n\n"  # before other pieces, where the vocabulary has no mark of files


class OtherPiece(msgspec.Struct):
    """A piece of another file, or from elsewhere in the same one."""

    text: str
    filename: Annotated[str, Meta(max_length=MOST_NAME_LETTERS)] = "tmp"


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a project. line: what follows `before`, as it was written last. pieces: of other files, latest last."""

    before: str
    behind: str
    line: str = ""
    pieces: Sequence[OtherPiece] = ()


def marks_of(model: Model) -> GapMarks:
    """Return a model's marks of a gap. Raises Refusal where it has none."""
    if (marks := model.gap_marks) is None:
        raise Refusal(400, "the model's vocabulary has no tokens that mark a gap: it fills none", code="not_supported")
    return marks


def gap_tokens(model: Model, prompt: str, suffix: str) -> list[int]:
    """Return the prompt for the gap between two texts, of which nothing is left out. Takes its time.

    Raises Refusal, and ContextFull for more than the context has room for.
    """
    marks = marks_of(model)
    if (n_letters := len(prompt) + len(suffix)) > MOST_LETTERS:
        raise Refusal(400, f"prompt and suffix: {n_letters:,} letters, {MOST_LETTERS:,} are the most", param="prompt")
    before, behind = (model.tokenize(text, add_special=False) for text in (prompt, suffix))
    tokens = [*marks.begins, marks.before, *before, marks.behind, *behind, marks.gap]
    check_room(len(tokens), model.context_tokens)  # before those of another prompt with this suffix are made
    return tokens


def infill_tokens(model: Model, gap: Gap, most_tokens: int | None) -> list[int]:
    """Return the prompt for a gap in a project, as llama-server makes it. Raises Refusal. Takes its time.

    Of what is before and behind the gap the nearest NEAR_TOKENS are taken; the latest of the other pieces have what the
    context has room for besides. most_tokens: of the answer.
    """
    marks, context_tokens = marks_of(model), model.context_tokens
    answer_tokens = max(1, min(USUAL_ANSWER_TOKENS if most_tokens is None else most_tokens, context_tokens // 4))
    near = max(0, min(NEAR_TOKENS, context_tokens - answer_tokens - len(marks.begins) - 3))
    before, line = _last(model, gap.before, 3 * (near // 4)), _last(model, gap.line, near // 4, has_marks=True)
    behind = _first(model, gap.behind, max(0, near // 4 - 2 - len(line)))
    here = [*marks.begins, marks.before, *before, *line, marks.behind, *behind, marks.gap]
    room_tokens = context_tokens - answer_tokens - near - len(marks.begins) - 3  # where others are cut hangs on no text
    return [*_others(model, marks, gap.pieces, room_tokens), *here]


def _others(model: Model, marks: GapMarks, pieces: Sequence[OtherPiece], room_tokens: int) -> list[int]:
    """Return so many tokens, those that are nearest to the gap, of other pieces and of the names around them."""
    found, n_found = list[list[int]](), 0
    for mark, text in _named(marks, pieces):
        if n_found >= room_tokens:
            break
        tokens = [*mark, *_last(model, text, room_tokens - n_found)]
        found.append(tokens)
        n_found += len(tokens)
    together = [token for tokens in reversed(found) for token in tokens]
    return together[max(0, n_found - max(0, room_tokens)) :]


def _named(marks: GapMarks, pieces: Sequence[OtherPiece]) -> Iterable[tuple[Sequence[int], str]]:
    """Yield marks and the texts that follow them, the nearest to the gap first."""
    has_files = marks.file >= 0
    if has_files:
        yield (marks.file,), _FILE
    for piece in reversed(pieces):
        yield (), piece.text
        yield ((marks.file,), f"{piece.filename}\n") if has_files else ((), _SNIPPET)
    if marks.project >= 0:
        yield (marks.project,), _PROJECT


def _last(model: Model, text: str, n_tokens: int, *, has_marks: bool = False) -> list[int]:
    """Return the last `n_tokens` tokens of a text at most. has_marks: whether control tokens in it count as such."""
    nearest = text[max(0, len(text) - min(MOST_LETTERS, _LETTERS_OF_A_TOKEN * n_tokens)) :]
    tokens = model.tokenize(nearest, add_special=False, parse_special=has_marks)
    return tokens[max(0, len(tokens) - n_tokens) :]


def _first(model: Model, text: str, n_tokens: int) -> list[int]:
    """Return the first `n_tokens` tokens of a text at most."""
    return model.tokenize(text[: min(MOST_LETTERS, _LETTERS_OF_A_TOKEN * n_tokens)], add_special=False)[:n_tokens]
