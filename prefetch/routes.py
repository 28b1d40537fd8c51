"""Route traces: which experts a model's routers chose, token by token, as `# route_trace v1` files.

A preamble of `# name=value ...` lines names the model and, for each layer with experts, the bytes of one; then come
comma-separated rows, read by the names in their first line. Columns that are not known are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

from edge_run.base.errors import ModelFileError, ModelFileMissing, TierReadError, reason_of
from edge_run.base.files.texts import as_text

FORMAT = "# route_trace v1"
PREFILL, DECODE = 0, 1
MOST_EXPERTS = MOST_LAYERS = 1 << 16
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_NAMED = ("model", "arch", "n_expert", "n_expert_used")
_LONGEST_LINE, _LONGEST_NAME = 4096, 200
_LARGEST = 1 << 62


class Route(NamedTuple):
    """One expert that a token was routed to.

    phase: PREFILL or DECODE. step: the token. slot: the router's rank. residency: 1 where it was in memory, and
    expert_bytes what was read for it otherwise.
    """

    turn: int
    phase: int
    step: int
    layer: int
    slot: int
    expert: int
    weight: float = 0.0
    residency: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RouteHeader:
    """What a trace says of its model. n_experts, n_used: of a layer, and of those for a token; 0 where it does not say.

    expert_bytes: of one expert, by layer that has some. dense_bytes: of the layer's other weights.
    """

    expert_bytes: dict[int, int]
    dense_bytes: dict[int, int] = field(default_factory=dict)
    model: str = ""
    architecture: str = ""
    n_experts: int = 0
    n_used: int = 0


class LookUp(NamedTuple):
    """What a layer needs at a time.

    experts: of a decoded token each once, by id; of a prompt as they were routed, token after token.
    """

    layer: int
    experts: tuple[int, ...]
    is_prefill: bool


class RouteReader:
    """A trace that is read row by row: a context manager, and an iterator of Route.

    Raises ModelFileError where it is no trace, or names what its preamble does not have; TierReadError where it cannot
    be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line = 0
        try:
            self._file = path.open(encoding="utf-8", errors="replace", newline="\n")
        except FileNotFoundError as error:
            raise ModelFileMissing(f"{path}: there is no such trace; record one, or correct the path") from error
        except OSError as error:
            raise TierReadError(f"{path}: cannot be read ({reason_of(error)})") from error
        try:
            self._columns, self.header = self._read_preamble()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RouteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Route]:
        places = [self._columns.index(name) for name in _NEEDED]
        n_columns, header = len(self._columns), self.header
        n_experts = header.n_experts or MOST_EXPERTS
        while line := self._next_line():
            cells = line.split(",")
            if len(cells) != n_columns:
                raise self._malformed(f"{len(cells)} fields, {n_columns} needed ({','.join(self._columns)[:200]})")
            numbers = [self._whole(self._columns[place], cells[place]) for place in places]
            turn, phase, step, layer, slot, expert = numbers
            if phase not in (PREFILL, DECODE):
                raise self._malformed(f"phase {phase}, {PREFILL} (prefill) or {DECODE} (decode) needed")
            if layer not in header.expert_bytes:
                raise self._malformed(f"layer {layer} is out of range: the preamble has no experts for it")
            if expert >= n_experts:
                raise self._malformed(f"expert {expert} is out of range, 0 to {n_experts - 1} needed")
            yield Route(turn, phase, step, layer, slot, expert)

    def look_ups(self) -> Iterator[LookUp]:
        """Yield what the layers look up: each token that was decoded, and each prompt as one batch for each layer."""
        chosen: dict[int, list[int]] = {}
        before: tuple[int, ...] = ()
        for route in self:
            now = (route.turn, route.phase, route.step * route.phase)  # a prompt is one batch, whatever its steps
            if now != before:
                yield from self._batch(chosen, before)
                chosen, before = {}, now
            chosen.setdefault(route.layer, []).append(route.expert)
        yield from self._batch(chosen, before)

    def _batch(self, chosen: dict[int, list[int]], key: tuple[int, ...]) -> Iterator[LookUp]:
        for layer, experts in chosen.items():
            is_prefill = key[1] == PREFILL
            yield LookUp(layer, tuple(experts if is_prefill else sorted(set(experts))), is_prefill)

    def _read_preamble(self) -> tuple[list[str], RouteHeader]:
        if self._next_line() != FORMAT:
            raise ModelFileError(
                f"{self._path}: not a route trace of a kind that is known: its first line is not {FORMAT!r}; choose a "
                "trace"
            )
        expert_bytes: dict[int, int] = {}
        dense_bytes: dict[int, int] = {}
        named: dict[str, str] = {}
        while (line := self._next_line()).startswith("#"):
            words = (word.partition("=") for word in line[1:].split())
            fields = {name: value for name, equals, value in words if equals}
            if "layer" not in fields:
                named |= {name: fields[name] for name in _NAMED if name in fields}
                continue
            layer = self._whole("layer", fields["layer"])
            if layer in dense_bytes:
                raise self._malformed(f"layer {layer} is there twice")
            if len(dense_bytes) == MOST_LAYERS:
                raise self._malformed(f"more than {MOST_LAYERS} layers, which no model has")
            dense_bytes[layer] = self._whole("dense_bytes", fields.get("dense_bytes", "0"))
            if size := self._whole("expert_bytes", fields.get("expert_bytes", "")):
                expert_bytes[layer] = size
        if not expert_bytes:
            raise self._malformed("the preamble names no layer with experts (# layer=N expert_bytes=B dense_bytes=D)")
        columns = line.split(",")
        if missing := [name for name in _NEEDED if name not in columns]:
            raise self._malformed(f"no column {', '.join(missing)}; needed are {', '.join(_NEEDED)}")
        n_experts = self._whole("n_expert", named.get("n_expert", "0"))
        if n_experts > MOST_EXPERTS:
            raise self._malformed(f"n_expert is {n_experts}, at most {MOST_EXPERTS} can be")
        n_used = self._whole("n_expert_used", named.get("n_expert_used", "0"))
        model, architecture = named.get("model", ""), named.get("arch", "")
        return columns, RouteHeader(expert_bytes, dense_bytes, model, architecture, n_experts, n_used)

    def _next_line(self) -> str:
        """Return the next line that is not empty, without its end; an empty one at the end of the file."""
        while True:
            try:
                line = self._file.readline(_LONGEST_LINE)
            except OSError as error:
                raise TierReadError(f"{self._path}: cannot be read ({reason_of(error)})") from error
            self._line += 1
            if not line or line.strip():
                return line.strip()

    def _whole(self, name: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < _LARGEST):
            shown = text if len(text) <= 30 else f"{text[:30]}..."
            raise self._malformed(f"{name} is {shown!r}, a whole number from 0 needed")
        return int(text)

    def _malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}, line {self._line}: {what}; record the trace again", line=self._line)


class RouteWriter:
    """Writes a trace to `file`, which stays the caller's: the preamble at once, then rows as they come."""

    def __init__(self, file: TextIO, header: RouteHeader) -> None:
        self._file = file
        lines = [FORMAT]
        about = {"model": _as_word(header.model), "arch": _as_word(header.architecture)}
        counts = {"n_layer": len(header.expert_bytes), "n_expert": header.n_experts, "n_expert_used": header.n_used}
        lines.append("# " + " ".join(f"{name}={value}" for name, value in {**about, **counts}.items() if value))
        for layer, size in header.expert_bytes.items():
            lines.append(f"# layer={layer} expert_bytes={size} dense_bytes={header.dense_bytes.get(layer, 0)}")
        lines.append(",".join(Route._fields))
        file.write("\n".join(lines) + "\n")

    def write(self, routes: Sequence[Route]) -> None:
        """Write a row for each of `routes`. Raises OSError where the file refuses."""
        self._file.write(
            "".join(
                f"{r.turn},{r.phase},{r.step},{r.layer},{r.slot},{r.expert},{r.weight:.6g},{r.residency},{r.expert_bytes}\n"
                for r in routes
            )
        )


def _as_word(name: str) -> str:
    """Return what a model file says as one word of a line that a reader takes: it may say anything."""
    return as_text("_".join(name.split())[:_LONGEST_NAME])
