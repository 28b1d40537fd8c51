"""The model of a Dask worker that is closed while tasks arrive: they have to go elsewhere, and nothing is opened."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from edge_run.runtime.batches.cluster_host import ModelHost


@pytest.fixture(scope="module")
def cluster_host() -> Any:
    """The module; with it comes Dask, which takes long to load: not where others only collect these tests."""
    pytest.importorskip("distributed")
    from edge_run.runtime.batches import cluster_host

    return cluster_host


@pytest.fixture
def host(cluster_host: Any) -> ModelHost:
    made: ModelHost = cluster_host.ModelHost({"version": "0"})
    made.setup(None)  # type: ignore[arg-type]
    return made


def test_a_host_that_was_closed_opens_nothing(host: ModelHost, cluster_host: Any) -> None:
    host._close()
    assert host.open() == cluster_host.GONE
    assert host.answer("task", b"{}") == cluster_host.GONE


def test_a_task_that_comes_when_the_portal_has_ended_goes_elsewhere(host: ModelHost, cluster_host: Any) -> None:
    class Ended:
        def start_task_soon(self, *_: Any, **__: Any) -> Future[Any]:
            raise RuntimeError("This portal is not running")

    host._portal = Ended()  # type: ignore[assignment]
    assert host.answer("task", b"{}") == cluster_host.GONE
    assert not host._running


def test_a_task_that_closing_did_not_see_is_cancelled(
    host: ModelHost, cluster_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing:
        def start_task_soon(self, *_: Any, **__: Any) -> Future[Any]:
            host._close()
            return Future()

    monkeypatch.setattr(cluster_host, "secede", lambda: None)  # which only a thread of a worker may
    host._portal = Closing()  # type: ignore[assignment]
    assert host.answer("task", b"{}") == cluster_host.GONE
    assert not host._running
