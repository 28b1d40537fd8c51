"""`/edge-run/status`: the machine at work, for the page and for whoever wants to draw it.

Counters only grow, and `now_s` is the clock that they go by: rates are the differences between two answers.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.files.texts import as_text
from edge_run.base.results import Forecast
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.service import Service

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed")


async def status(service: Service, request: Request) -> Response:
    """Say what holds the budget, what was read, who is answered, and how fast."""
    return json_response(status_document(service))


def status_document(service: Service) -> dict[str, Any]:
    """Return what `/edge-run/status` says; the keys of results are those of `--json`.

    While no model is open, `model` is null, and what else is said of one is not there.
    """
    catalogue, counts, served = service.catalogue, service.counts, service.open
    return {
        "now_s": time.monotonic(),
        "version": service.version,
        "started_s": service.began_s,
        "is_shutting_down": service.admission.is_closed,
        "models": [_entry(service, entry) for entry in catalogue.known.entries],
        "left_out": [dataclasses.asdict(file) for file in catalogue.known.left_out],
        "sampling": {
            **{name: getattr(service.defaults.sampling, name) for name in _SAMPLING},
            "max_tokens": service.defaults.most_tokens,
        },
        "tokens": {
            "generated": counts.generated_tokens,
            "prompt": counts.prompt_tokens,
            "cached": counts.cached_tokens,
        },
        "requests": {
            "running": service.admission.n_running,
            "waiting": service.admission.n_waiting,
            "most_parallel": served.model.most_parallel if served else 0,
            "max_queue": service.admission.max_queue,
            "finished": counts.finished,
        },
        **(_of_model(served) if served else {"model": None, "notices": []}),
    }


def _entry(service: Service, entry: ModelEntry) -> dict[str, Any]:
    error = service.catalogue.known.failure(entry.name)
    return {
        "name": entry.name,
        "size_bytes": entry.size_bytes,
        "has_chat_template": bool(entry.chat_template),
        "state": service.catalogue.state(entry.name),
        "error": str(error) if error else None,
    }


def _of_model(served: ServedModel) -> dict[str, Any]:
    """Return what there is to say of the model that is open."""
    model = served.model
    plan, stats = model.plan, model.stats
    return {
        "model": {
            "name": served.name,
            "size_bytes": plan.model_bytes,
            "mode": plan.mode,
            "backend": dataclasses.asdict(stats.backend),
            "context_tokens": model.context_tokens,
            "trained_context_tokens": model.trained_context_tokens,
            "has_chat_template": model.has_chat_template,
            "embedding": dataclasses.asdict(shape) if (shape := model.embedding) else None,
        },
        "memory": {
            **dataclasses.asdict(stats.memory),
            "resident_bytes": process_memory().resident_bytes,
            "lent_bytes": plan.lent_bytes,
            "expert_bytes": plan.expert_bytes,
            "items": [dataclasses.asdict(item) for item in plan.items],
        },
        "io": {
            "bytes_read": stats.io.bytes_read,
            "bandwidth_bytes_per_s": stats.io.bandwidth_bytes_per_s,
            "limit_bytes_per_s": _drive_limit(served.forecast),
            "efficiency": stats.io.efficiency,
            "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
        },
        "speed": dataclasses.asdict(served.counts.latest),
        "forecast": dataclasses.asdict(served.forecast) if served.forecast else None,
        "progress": dataclasses.asdict(progress) if (progress := model.progress) else None,
        "speculation": dataclasses.asdict(model.speculation),
        "experts": dataclasses.asdict(stats.experts) if stats.experts else None,
        "mesh": dataclasses.asdict(mesh) if (mesh := model.mesh_use) else None,
        "notices": [as_text(notice) for notice in model.notices],
    }


def _drive_limit(forecast: Forecast | None) -> float:
    """Return what the drive was measured to read in a second; 0 where that is not known, or nothing streams."""
    if forecast is None or not forecast.read_s_per_token:
        return 0.0
    return forecast.read_bytes_per_token / forecast.read_s_per_token
