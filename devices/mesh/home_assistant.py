"""Shows a device to Home Assistant by its MQTT discovery: configuration that the broker keeps, and plain states.

Home Assistant knows nothing of edge-run's signatures. What it shows is for people, and edge-run never reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from edge_run.base.fields import Document
from edge_run.devices.messages.topics import ROOT

_SENSORS = (
    ("tokens_per_s", "Tokens per second", "tokens/s"),
    ("model", "Model", None),
    ("members", "Devices in the mesh", None),
)


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """A message that is not signed.

    is_kept: the broker keeps it.
    """

    topic: str
    payload: bytes
    is_kept: bool
    is_confirmed: bool = True


class HomeAssistant:
    """One node as Home Assistant is shown it."""

    def __init__(self, publish: Callable[[PlainMessage], object], cluster: str, node: str, name: str) -> None:
        self._publish, self._node = publish, node
        self._topic = f"{ROOT}/{cluster}/home/{node}"
        self._device: Document = {
            "identifiers": [f"edge-run-{node}"],
            "name": f"edge-run {name}",
            "manufacturer": "edge-run",
        }

    def introduce(self) -> None:
        """Make the node a device of Home Assistant, with its sensors."""
        self._configure("binary_sensor", "present", "Present", {"device_class": "connectivity", "expire_after": 120})
        for key, label, unit in _SENSORS:
            self._configure("sensor", key, label, {"unit_of_measurement": unit} if unit else {})

    def show(self, load: Document, members: int, *, is_present: bool) -> None:
        """Set what the sensors show."""
        rate, model = load.get("tokens_per_s"), load.get("model")
        content = {
            "present": "ON" if is_present else "OFF",
            "tokens_per_s": round(rate, 2) if isinstance(rate, (int, float)) else 0,
            "model": model if isinstance(model, str) else "none",
            "members": members,
        }
        self._publish(PlainMessage(self._topic, json.dumps(content).encode(), is_kept=True))

    def _configure(self, kind: str, key: str, label: str, more: Document) -> None:
        content = {
            "name": label,
            "unique_id": f"edge-run-{self._node}-{key}",
            "state_topic": self._topic,
            "value_template": f"{{{{ value_json.{key} }}}}",
            "device": self._device,
            **more,
        }
        topic = f"homeassistant/{kind}/{self._node}/{key}/config"
        self._publish(PlainMessage(topic, json.dumps(content).encode(), is_kept=True))
