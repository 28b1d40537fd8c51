"""Prompts to tokens, without tokenizing all of a text that is far too long: that takes 25 bytes for each character."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.errors import ContextFull, option
from edge_run.base.units import KIB, format_size
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.model import LlamaModel

PIECE_CHARACTERS = 64 * KIB
USUAL_CHARACTERS = 8  # of a token, at most: a text that is no longer may well fit
CLEARLY = 2  # so many contexts do not fit, however the cuts between pieces fell
CLEARLY_IN_A_CHAT = 8  # a template may leave out a part


@dataclass(frozen=True, slots=True)
class GapMarks:
    """The tokens that tell a model of a gap in a text: what was before it and behind it follows them, then its own.

    project, file: the name of what a text is from follows them; -1 where the vocabulary has none.
    begins: what each text begins with.
    """

    before: int
    behind: int
    gap: int
    project: int
    file: int
    begins: tuple[int, ...]


def gap_marks(model: LlamaModel) -> GapMarks | None:
    """Return a model's marks of a gap; None where its vocabulary lacks one that each gap needs."""

    def read() -> GapMarks:
        vocab = model.vocab
        needed = L.llama_vocab_fim_pre(vocab), L.llama_vocab_fim_suf(vocab), L.llama_vocab_fim_mid(vocab)
        begins = (model.bos_token,) if model.adds_bos else ()
        return GapMarks(*needed, L.llama_vocab_fim_rep(vocab), L.llama_vocab_fim_sep(vocab), begins)

    marks = model.visitors.visit(read)
    return marks if min(marks.before, marks.behind, marks.gap) >= 0 else None


def tokenize_prompt(model: LlamaModel, text: str, room_tokens: int) -> list[int]:
    """Return the tokens of a prompt, with the model's BOS, and with control tokens that are written in it as such.

    room_tokens: the context. Raises ContextFull where `text` is clearly longer, ConfigError for what cannot be written.
    """
    refuse_what_is_too_long(model, text, room_tokens)
    return model.tokenize(text, add_special=True, parse_special=True)


def refuse_what_is_too_long(model: LlamaModel, text: str, room_tokens: int, clearly: int = CLEARLY) -> None:
    """Raise ContextFull for a text of more than `clearly` times `room_tokens`. Ctrl-C ends it between pieces."""
    if len(text) <= max(PIECE_CHARACTERS, clearly * USUAL_CHARACTERS * room_tokens):
        return
    found = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        found += model.count_tokens(text[start : start + PIECE_CHARACTERS])
        if found > clearly * room_tokens:
            raise ContextFull(
                f"prompt of {format_size(len(text))}: its first {format_size(start + PIECE_CHARACTERS)} are "
                f"{found:,} tokens already, the context holds {room_tokens:,}; {_advice()}",
                prompt_tokens=found,
                context_tokens=room_tokens,
            )


def _advice() -> str:
    longer, larger = option("context_tokens"), option("memory")
    return f"shorten it, or give more context ({longer}), or more {larger} where that is what limits it"


def check_room(n_tokens: int, room_tokens: int) -> None:
    """Raise ContextFull where a prompt of so many tokens leaves no room for another one."""
    if n_tokens >= room_tokens:
        raise ContextFull(
            f"prompt of {n_tokens} tokens: the context holds {room_tokens} with at least one to generate; {_advice()}",
            prompt_tokens=n_tokens,
            context_tokens=room_tokens,
        )
