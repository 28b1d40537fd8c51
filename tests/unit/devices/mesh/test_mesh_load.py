"""How long a device is said to be busy."""

from __future__ import annotations

import math

from edge_run.devices.mesh.load import LoadReport


def test_a_speed_that_nothing_renews_ends_and_is_said_to() -> None:
    now_s = [100.0]
    report = LoadReport(lambda: now_s[0])
    for rate in (8.0, 9.0):
        report.set({"tokens_per_s": rate}, 5.0)
        assert report.wait_s() == 0.0
        assert report.take({}, 2) == {"tokens_per_s": rate, "links": {}}
        now_s[0] += 4.5
        report.pass_time()
        assert report.wait_s() == math.inf
    now_s[0] += 1.0
    assert report.wait_s() == math.inf, "who asks changes nothing"
    report.pass_time()
    assert report.wait_s() == 0.0
    assert report.take({}, 2) == {"links": {}}
    now_s[0] += 99.0
    report.pass_time()
    assert report.wait_s() == math.inf, "it is said once"


def test_what_a_worker_says_stays_until_it_says_something_else() -> None:
    now_s = [100.0]
    report = LoadReport(lambda: now_s[0])
    report.set({"model": "m.gguf", "tokens_per_s": 0.0})
    report.take({}, 2)
    now_s[0] += 1e6
    report.pass_time()
    assert report.wait_s() == math.inf
