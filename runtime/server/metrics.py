"""`/metrics`, for Prometheus: vLLM's names where they fit, and what only a machine that streams weights has."""

from __future__ import annotations

from collections.abc import Iterator

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
        service, name = self._service, [self._service.name]
        counts, stats = service.counts, service.model.stats
        gauges = {
            "vllm:num_requests_running": ("Requests that are being answered.", service.admission.n_running),
            "vllm:num_requests_waiting": ("Requests without a token yet.", service.admission.n_waiting),
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
            gauge = GaugeMetricFamily(key, text, labels=_LABEL)
            gauge.add_metric(name, value)
            yield gauge
        totals = {
            "vllm:prompt_tokens": ("Tokens of prompts.", counts.prompt_tokens),
            "vllm:generation_tokens": ("Tokens of answers.", counts.generated_tokens),
            "vllm:prefix_cache_queries": ("Tokens of prompts that were looked for.", counts.prompt_tokens),
            "vllm:prefix_cache_hits": ("Tokens of prompts that were computed already.", counts.cached_tokens),
            "edge_run:read_bytes": ("Bytes read from drives.", stats.io.bytes_read),
        }
        for key, (text, value) in totals.items():
            counter = CounterMetricFamily(key, text, labels=_LABEL)
            counter.add_metric(name, value)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Answers by how they ended.", labels=[*_LABEL, "finished_reason"]
        )
        for reason, count in counts.finished.items():
            ended.add_metric([*name, reason], count)
        yield ended
        for key, text, spread in (
            ("vllm:time_to_first_token_seconds", "Until the first token.", counts.first_token_s),
            ("vllm:e2e_request_latency_seconds", "Of a request.", counts.request_s),
            ("vllm:time_per_output_token_seconds", "Of a token after the first.", counts.token_s),
        ):
            yield _histogram(key, text, spread, name)


def _histogram(key: str, text: str, spread: Spread, labels: list[str]) -> HistogramMetricFamily:
    made = HistogramMetricFamily(key, text, labels=_LABEL)
    bounds = [*(f"{bound:g}" for bound in spread.bounds), "+Inf"]
    so_far = [sum(spread.counts[: index + 1]) for index in range(len(spread.counts))]
    made.add_metric(labels, list(zip(bounds, so_far, strict=True)), spread.total)
    return made
