"""Requests for a chat as OpenAI's clients write them, taken or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.server.apis.openai_chat import ChatRequest
from edge_run.runtime.server.apis.openai_messages import template_messages
from edge_run.runtime.server.bodies import decode
from edge_run.runtime.server.refusals import Refusal

HELLO = {"role": "user", "content": "Hello"}


def chat(**fields: Any) -> ChatRequest:
    request = decode(json.dumps({"messages": [HELLO], **fields}).encode(), ChatRequest)
    request.check()
    request.variables()
    request.sampling(SamplingConfig())
    template_messages(request.messages)
    return request


def refused(**fields: Any) -> tuple[int, str | None]:
    with pytest.raises(Refusal) as caught:
        chat(**fields)
    return caught.value.status, caught.value.param
