"""A member that is sent away and does not go: after how long all others refuse it, and what of it they still accept.

Four devices, each with its own key and folder, over a broker: once mosquitto, which takes whoever comes, once the
embedded one. The founder's command removes a device whose program is made to ignore every list: it goes on as before,
says 1,000 control messages (heartbeats, announcements, claims, plans, orders, answers), over the broker and over its
links, and sends on the data link. Measured from the start of the command. Needs mosquitto.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _box import ROOT, write_results
from _mesh_box import need_mesh

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.base.errors import EdgeRunError
from edge_run.base.mesh import Message
from edge_run.devices.members.cluster import read_cluster
from edge_run.devices.members.identity import device_key
from edge_run.devices.mesh.changes import make_change
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import access_of, serving
from mesh_lists import defy, make_cluster
from mosquitto import Mosquitto, free_port

NAMES, MESSAGES = ["one", "two", "three", "gone"], 1000
KINDS = ("status", "caps", "lease", "plan", "rsp", "cmd")
BODIES = {"status": {"state": "here"}, "lease": {"state": "claim"}}


def wait_for(is_so: Callable[[], bool], limit_s: float = 20.0) -> float:
    """Return after how many seconds it was so; infinity where it was not."""
    started_s = time.monotonic()
    while not is_so():
        if time.monotonic() - started_s > limit_s:
            return float("inf")
        time.sleep(0.002)
    return time.monotonic() - started_s


def count_accepted(node: LocalNode, gone: str) -> list[str]:
    """Return a list that grows with the kind of each control message of `gone` that `node` understands."""
    accepted: list[str] = []
    understand = node.state._understand

    def counting(topic: Any, envelope: Any, *words: Any, **more: Any) -> None:
        if envelope.node == gone:
            accepted.append(topic.kind)
        understand(topic, envelope, *words, **more)

    node.state._understand = counting  # type: ignore[method-assign]
    return accepted


def say(node: LocalNode, others: list[LocalNode], number: int) -> None:
    kind, to = KINDS[number % len(KINDS)], others[number % len(others)]
    body: dict[str, Any] = {"number": number, "order": {"order": "close"}, "load": {}, "plan": {}} | BODIES.get(
        kind, {}
    )
    with node.held() as state:
        state._send(kind, body, node=to.node, epoch=(1 << 21) + number, is_direct=number % 2 == 1)


def is_taken(node: LocalNode, to: LocalNode) -> bool:
    try:
        node.link.send(to.node, {"word": 1}, timeout_s=0.3)
    except EdgeRunError:
        return False
    return True


def one_round(folder: Path, place: str, *, is_embedded: bool) -> dict[str, Any]:
    make_cluster(folder, f"mqtt://{place}", NAMES, place if is_embedded else None)
    founder, cluster = device_key(folder / "one"), read_cluster(folder / "one")
    assert cluster is not None
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(serving(cluster, founder))
        nodes = [open_mesh(MeshConfig(folder / name, name=name)) for name in NAMES]
        for node in nodes:
            stack.callback(node.close)
        wait_for(lambda: all(len(node.members()) == len(NAMES) for node in nodes))
        *others, gone = nodes
        for node in others:
            gone.link.send(node.node, {"hello": 1}, timeout_s=5)
            node.link.receive(timeout_s=5)
        defy(gone)
        started_s = time.monotonic()
        make_change(folder / "one", lambda editor: editor.remove("gone"), lambda listed: True)
        if broker is not None:  # as `mesh join` does
            broker.set_access(access_of(others[0].cluster, founder))
        wait_for(lambda: all(gone.node not in [one.node for one in node.members()] for node in others))
        refused_s = time.monotonic() - started_s
        accepted = [count_accepted(node, gone.node) for node in others]
        cut_s = wait_for(lambda: not any(is_taken(gone, node) for node in others))
        for number in range(MESSAGES):
            say(gone, others, number)
            if number % 100 == 99:
                time.sleep(0.2)
        time.sleep(2.0)
        data = 0
        for node in others:
            with contextlib.suppress(EdgeRunError):
                while (message := node.link.receive(timeout_s=0.1)) is not None:
                    data += isinstance(message, Message) and message.node == gone.node and "word" in message.header
        return {
            "broker": "embedded" if is_embedded else "mosquitto, anonymous",
            "refused_by_all_s": round(refused_s, 3),
            "links_cut_s": round(cut_s, 3),
            "messages": MESSAGES,
            "accepted": sum(map(len, accepted)),
            "data_accepted": data,
            "still_at_broker": gone.is_connected,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds, rows = parser.parse_args().rounds, []
    need_mesh()
    for number in range(2 * rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder, is_embedded = Path(temporary), number % 2 == 1
            mosquitto = Mosquitto(folder)
            if not is_embedded:
                mosquitto.start()
            try:
                place = f"127.0.0.1:{free_port() if is_embedded else mosquitto.port}"
                rows.append(one_round(folder, place, is_embedded=is_embedded))
            finally:
                mosquitto.stop()
            print(rows[-1], flush=True)
    lines = ["| broker | refused by all after | links cut after | messages accepted | still at the broker |"]
    lines.append("|---|---|---|---|---|")
    for broker in dict.fromkeys(row["broker"] for row in rows):
        own = [row for row in rows if row["broker"] == broker]
        refused, cut = ([row[name] for row in own] for name in ("refused_by_all_s", "links_cut_s"))
        lines.append(
            f"| {broker} | {statistics.median(refused):.2f} s, at most {max(refused):.2f} | "
            f"{statistics.median(cut):.2f} s, at most {max(cut):.2f} | "
            f"{sum(row['accepted'] for row in own)} of {sum(row['messages'] for row in own)}, data "
            f"{sum(row['data_accepted'] for row in own)} | {sum(row['still_at_broker'] for row in own)} of {len(own)} |"
        )
    write_results("mesh-removal", rows, "\n".join([__doc__ or "", f"{rounds} rounds each.", "", *lines]))


if __name__ == "__main__":
    main()
