"""What others are shown of a worker: which model, and how fast."""

from __future__ import annotations

from edge_run.base.fields import Document
from edge_run.runtime.worker.work_report import WorkReport


def test_it_says_the_model_at_once_and_the_speed_each_second() -> None:
    said: list[Document] = []
    now_s = [100.0]
    report = WorkReport(said.append, lambda: now_s[0])
    report.tell("")
    assert not said
    report.tell("m.gguf")
    assert said == [{"model": "m.gguf", "tokens_per_s": 0.0}]
    for _ in range(8):
        now_s[0] += 0.25
        report.count(2)
        report.tell("m.gguf")
    assert said[1:] == [{"model": "m.gguf", "tokens_per_s": 8.0}], "what has not changed is not said again"
    for _ in range(2):
        now_s[0] += 1.0
        report.tell("m.gguf")
    assert said[2:] == [{"model": "m.gguf", "tokens_per_s": 0.0}]
    report.tell("")
    assert said[3:] == [{}]
