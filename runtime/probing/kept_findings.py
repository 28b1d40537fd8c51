"""What was found out about a model or this device, and is kept in the cache folder, each in a file of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edge_run.base.files.identity import file_facts
from edge_run.base.files.whole import keep_file
from edge_run.base.strict_json import parse
from edge_run.runtime.probing.workload import this_setup
from edge_run.tiers.gguf import GgufModel

MOST_FINDINGS = 200  # in a file: there is one for each budget that a model was opened with

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class KeptFindings:
    """The file at `place`; None where nothing can be kept."""

    place: Path | None

    @classmethod
    def of_model(cls, folder: Path, gguf: GgufModel) -> KeptFindings:
        """Return what is kept about a model in a folder of the cache, until its files change."""
        import hashlib  # which takes long to load

        try:
            facts = [file_facts(shard.path) for shard in gguf.shards]
        except OSError:  # where the model file is gone by now
            return cls(None)
        file_name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        return cls(folder / f"{file_name}.json")

    @classmethod
    def of_setup(cls, folder: Path) -> KeptFindings:
        """Return what is kept about this device and its llama.cpp in a folder of the cache."""
        return cls(folder / this_setup().file_name)

    def read(self, understood: Callable[[Any], _Found]) -> _Found | None:
        """Return what `understood` makes of what is kept; None where there is nothing, or it is not understood.

        understood: may raise what comes of a document of any other form: ValueError, TypeError, KeyError,
            AttributeError.
        """
        try:
            return understood(parse(self.place.read_bytes())) if self.place else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def decide(self, kept: Mapping[str, object], decided: Mapping[str, object]) -> None:
        """Keep what was `decided`, where that is new, as the latest beside what was `kept` before.

        So decisions that nobody asked for again are the first to be forgotten.
        """
        if any(kept.get(name) != decision for name, decision in decided.items()):
            self.write({**{name: kept[name] for name in kept if name not in decided}, **decided})

    def write(self, found: Mapping[str, object]) -> None:
        """Keep the last `MOST_FINDINGS` of `found` in place of what was kept; that it cannot be written is no error."""
        if self.place:
            latest = dict(list(found.items())[-MOST_FINDINGS:])
            keep_file(self.place, json.dumps(latest).encode(), "what was found out")
