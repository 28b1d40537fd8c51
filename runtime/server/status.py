"""`/edge-run/status`: the machine at work, for the page and for whoever wants to draw it.

Counters only grow, and `now_s` is the clock that they go by: rates are the differences between two answers.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.results import Plan
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.service import Service

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "seed")


async def status(service: Service, request: Request) -> Response:
    """Say what holds the budget, what was read, who is answered, and how fast."""
    return json_response(status_document(service))


def status_document(service: Service) -> dict[str, Any]:
    """Return what `/edge-run/status` says; the keys of results are those of `--json`."""
    model, counts = service.model, service.counts
    plan, stats, latest = model.plan, model.stats, counts.latest
    return {
        "now_s": time.monotonic(),
        "version": service.version,
        "started_s": service.began_s,
        "is_shutting_down": service.admission.is_closed,
        "model": {
            "name": service.name,
            "size_bytes": plan.model_bytes,
            "mode": plan.mode,
            "backend": dataclasses.asdict(stats.backend),
            "context_tokens": model.context_tokens,
            "trained_context_tokens": model.trained_context_tokens,
            "has_chat_template": model.has_chat_template,
            "embedding": dataclasses.asdict(shape) if (shape := model.embedding) else None,
        },
        "sampling": {
            **{name: getattr(service.sampling, name) for name in _SAMPLING},
            "max_tokens": service.most_tokens,
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
            "limit_bytes_per_s": _drive_limit(plan),
            "efficiency": stats.io.efficiency,
            "streamed_bytes_per_pass": plan.streamed_bytes_per_pass,
        },
        "tokens": {
            "generated": counts.generated_tokens,
            "prompt": counts.prompt_tokens,
            "cached": counts.cached_tokens,
        },
        "requests": {
            "running": service.admission.n_running,
            "waiting": service.admission.n_waiting,
            "most_parallel": model.most_parallel,
            "max_queue": service.admission.max_queue,
            "finished": counts.finished,
        },
        "speed": {
            "decode_tokens_per_s": latest.decode_tokens_per_s if latest else 0.0,
            "prefill_tokens_per_s": latest.prefill_tokens_per_s if latest else 0.0,
            "first_token_s": latest.ttft_s if latest else 0.0,
        },
        "forecast": dataclasses.asdict(plan.forecast) if plan.forecast else None,
        "progress": dataclasses.asdict(progress) if (progress := model.progress) else None,
        "speculation": dataclasses.asdict(model.speculation),
        "experts": dataclasses.asdict(stats.experts) if stats.experts else None,
        "mesh": dataclasses.asdict(mesh) if (mesh := model.mesh_use) else None,
        "notices": list(model.notices),
    }


def _drive_limit(plan: Plan) -> float:
    """Return what the drive was measured to read in a second; 0 where that is not known, or nothing streams."""
    if plan.forecast is None or not plan.forecast.read_s_per_token:
        return 0.0
    return plan.streamed_bytes_per_pass / plan.forecast.read_s_per_token
