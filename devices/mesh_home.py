"""Showing devices to Home Assistant, by its MQTT discovery: configuration that the broker keeps, and plain states.

Home Assistant knows nothing of our signatures: what it is shown is for people, and nothing of ours reads it back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from edge_run.base.mesh import Document, JsonValue
from edge_run.devices.mesh_topics import ROOT

_SENSORS = (
    ("tokens_per_s", "Tokens per second", "tokens/s"),
    ("model", "Model", None),
    ("members", "Devices in the mesh", None),
)


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """A message that is not signed. is_kept: the broker keeps it."""

    topic: str
    payload: bytes
    is_kept: bool
    is_confirmed: bool = True


def state_topic(cluster: str, node: str) -> str:
    """Return where the plain state of a node is."""
    return f"{ROOT}/{cluster}/home/{node}"


def discovery(cluster: str, node: str, name: str) -> list[PlainMessage]:
    """Return what makes a node a device of Home Assistant, with its sensors."""
    device = {"identifiers": [f"edge-run-{node}"], "name": f"edge-run {name}", "manufacturer": "edge-run"}
    found = [_config("binary_sensor", cluster, node, "present", "Present", None, device)]
    found += [_config("sensor", cluster, node, key, label, unit, device) for key, label, unit in _SENSORS]
    return found


def forget(node: str) -> list[PlainMessage]:
    """Return what makes Home Assistant forget a node."""
    kinds = [("binary_sensor", "present"), *(("sensor", key) for key, _, _ in _SENSORS)]
    return [PlainMessage(f"homeassistant/{kind}/edge-run-{node}/{key}/config", b"", True) for kind, key in kinds]


def state(cluster: str, node: str, load: Document, members: int, *, is_present: bool) -> PlainMessage:
    """Return what the sensors show."""
    rate, model = load.get("tokens_per_s"), load.get("model")
    content: Document = {
        "present": "ON" if is_present else "OFF",
        "tokens_per_s": round(rate, 2) if isinstance(rate, (int, float)) else 0,
        "model": model if isinstance(model, str) else "none",
        "members": members,
    }
    return PlainMessage(state_topic(cluster, node), json.dumps(content).encode(), True)


def _config(
    kind: str, cluster: str, node: str, key: str, label: str, unit: str | None, device: Document
) -> PlainMessage:
    content: dict[str, JsonValue] = {
        "name": label,
        "unique_id": f"edge-run-{node}-{key}",
        "state_topic": state_topic(cluster, node),
        "value_template": f"{{{{ value_json.{key} }}}}",
        "device": device,
    }
    if unit:
        content["unit_of_measurement"] = unit
    if kind == "binary_sensor":
        content |= {"device_class": "connectivity", "expire_after": 120}
    return PlainMessage(f"homeassistant/{kind}/edge-run-{node}/{key}/config", json.dumps(content).encode(), True)
