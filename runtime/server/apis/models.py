"""`/v1/models` and `/v1/models/NAME`, as OpenAI and Anthropic have them, with what llama-server says besides."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.catalogue.folder import ModelEntry
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.service import Service


async def models(service: Service, request: Request) -> Response:
    """List the models."""
    data = [model_document(service, entry) for entry in service.catalogue.known.entries]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, "has_more": False, **ends})


async def one_model(service: Service, request: Request) -> Response:
    """Describe a model. Raises Refusal for a name that none has."""
    entry = service.catalogue.known.named(request.path_params["model"])
    if entry is None:
        raise Refusal(404, "there is no model of this name", param="model", code="model_not_found")
    return json_response(model_document(service, entry))


def model_document(service: Service, entry: ModelEntry) -> dict[str, Any]:
    """Return a model as the APIs describe it. `meta` says of a model that is not open what its file says."""
    meta: dict[str, Any] = {"n_ctx_train": entry.trained_context_tokens, "size": entry.size_bytes}
    if (found := service.catalogue.open) is not None and found.entry == entry:
        meta["n_ctx"] = found.model.context_tokens
    since_s = service.since_s(entry)
    since = datetime.fromtimestamp(since_s, timezone.utc).isoformat()
    anthropic = {"type": "model", "display_name": entry.name, "created_at": since}
    openai = {"object": "model", "created": since_s, "owned_by": "edge-run"}
    state = {"value": service.catalogue.state(entry.name)}
    if (error := service.catalogue.known.failure(entry.name)) is not None:
        state["error"] = str(error)
    return {"id": entry.name, **openai, **anthropic, "status": state, "meta": meta}
