"""`/metrics`, for Prometheus: vLLM's names where they fit, and what only a machine that streams weights has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response

from edge_run.devices.host.memory import process_memory
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.counts import Spread
from edge_run.runtime.server.service import Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_LABEL = ["model_name"]


async def metrics(service: Service, request: Request) -> Response:
    """Return all figures as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(service))
    return Response(generate_latest(registry), media_type=TEXT)


class _Figures:
    """The figures of a service at the moment when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield each figure."""
        service = self._service
        names = [entry.name for entry in service.catalogue.known.entries]
        served, requests = service.open, {name: service.admission.of_model(name) for name in names}
        for key, text, index in (
            ("vllm:num_requests_running", "Requests that are being answered.", 0),
            ("vllm:num_requests_waiting", "Requests without a token yet.", 1),
        ):
            yield _gauge(key, text, {name: requests[name][index] for name in names})
        is_open = {name: float(served is not None and served.name == name) for name in names}
        yield _gauge("edge_run:model_open", "1 of the model that is open.", is_open)
        if served is not None:
            yield from _of_model(served)
        counts = {name: service.counts_of(name) for name in names}
        for key, text, field in (
            ("vllm:prompt_tokens", "Tokens of prompts.", "prompt_tokens"),
            ("vllm:generation_tokens", "Tokens of answers.", "generated_tokens"),
            ("vllm:prefix_cache_queries", "Tokens of prompts that were looked for.", "prompt_tokens"),
            ("vllm:prefix_cache_hits", "Tokens of prompts that were computed already.", "cached_tokens"),
            ("vllm:spec_decode_num_draft_tokens", "Guesses that were verified.", "drafted_tokens"),
            ("vllm:spec_decode_num_accepted_tokens", "Guesses that came true.", "accepted_tokens"),
        ):
            yield _counter(key, text, {name: getattr(one, field) for name, one in counts.items()})
        ended = CounterMetricFamily(
            "vllm:request_success", "Answers by how they ended.", labels=[*_LABEL, "finished_reason"]
        )
        for name, one in counts.items():
            for reason, count in one.finished.items():
                ended.add_metric([name, reason], count)
        yield ended
        for key, text, field in (
            ("vllm:time_to_first_token_seconds", "Until the first token.", "first_token_s"),
            ("vllm:e2e_request_latency_seconds", "Of a request.", "request_s"),
            ("vllm:time_per_output_token_seconds", "Of a token after the first.", "token_s"),
        ):
            yield _histogram(key, text, {name: getattr(one, field) for name, one in counts.items()})


def _of_model(served: ServedModel) -> Iterator[Metric]:
    """Yield the figures of the model that is open."""
    stats = served.model.stats
    gauges = {
        "edge_run:budget_bytes": ("What the process may take.", stats.memory.budget_bytes),
        "edge_run:resident_bytes": ("What the process takes.", process_memory().resident_bytes),
        "edge_run:peak_bytes": ("The most that the process took.", stats.memory.peak_bytes),
        "edge_run:pinned_bytes": ("Weights that stay in memory.", stats.memory.pinned_bytes),
        "edge_run:window_bytes": ("Memory through which weights stream.", stats.memory.window_bytes),
        "edge_run:efficiency": ("Computing or reading over wall time; 1 is the limit.", stats.io.efficiency),
    }
    if stats.experts:
        gauges["edge_run:expert_hit_rate"] = ("Bytes of experts found in memory.", stats.experts.hit_rate)
    for key, (text, value) in gauges.items():
        yield _gauge(key, text, {served.name: value})
    yield _counter("edge_run:read_bytes", "Bytes read from drives.", {served.name: stats.io.bytes_read})


def _gauge(key: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    made = GaugeMetricFamily(key, text, labels=_LABEL)
    for name, value in values.items():
        made.add_metric([name], value)
    return made


def _counter(key: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    made = CounterMetricFamily(key, text, labels=_LABEL)
    for name, value in values.items():
        made.add_metric([name], value)
    return made


def _histogram(key: str, text: str, spreads: Mapping[str, Spread]) -> HistogramMetricFamily:
    made = HistogramMetricFamily(key, text, labels=_LABEL)
    for name, spread in spreads.items():
        bounds = [*(f"{bound:g}" for bound in spread.bounds), "+Inf"]
        so_far = [sum(spread.counts[: index + 1]) for index in range(len(spread.counts))]
        made.add_metric([name], list(zip(bounds, so_far, strict=True)), spread.total)
    return made
