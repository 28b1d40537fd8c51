"""What an idle mesh sends: bytes on the wire per node, with 4 nodes, nobody leading, over 60 seconds.

Each node is a process in a network namespace of its own, joined to the broker's (mosquitto) by a bridge; counted are
the bytes of its network card, both ways, with all headers, once all have found each other. Needs root and mosquitto.
Processor time of a node's process over the same time is given too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _box import ROOT, write_results
from _mesh_box import need_mesh

from edge_run.devices.members.cluster import new_cluster, write_cluster
from mosquitto import PROGRAM

NODES, PREFIX, NETWORK = 4, "erm", "10.213.77"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_namespaces() -> None:
    ip("link", "add", f"{PREFIX}br", "type", "bridge")
    ip("addr", "add", f"{NETWORK}.1/24", "dev", f"{PREFIX}br")
    ip("link", "set", f"{PREFIX}br", "up")
    for number in range(NODES):
        name = f"{PREFIX}{number}"
        ip("netns", "add", name)
        ip("link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"{name}o", "master", f"{PREFIX}br", "up")
        ip("-n", name, "addr", "add", f"{NETWORK}.{10 + number}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def remove_namespaces() -> None:
    for number in range(NODES):
        subprocess.run(["ip", "netns", "del", f"{PREFIX}{number}"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "del", f"{PREFIX}br"], check=False, stderr=subprocess.DEVNULL)


def counted(number: int) -> int:
    folder = Path(f"/sys/class/net/{PREFIX}{number}o/statistics")
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    need_mesh(in_networks=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        processes: list[subprocess.Popen[str]] = []
        settings = f"user root\nlistener 18893 {NETWORK}.1\nallow_anonymous true\npersistence false\n"
        (folder / "mosquitto.conf").write_text(settings)
        try:
            make_namespaces()
            broker = subprocess.Popen([PROGRAM or "", "-c", str(folder / "mosquitto.conf")], stderr=subprocess.DEVNULL)
            processes.append(broker)  # type: ignore[arg-type]
            time.sleep(1)
            cluster = new_cluster(f"mqtt://{NETWORK}.1:18893")
            for number in range(NODES):
                write_cluster(folder / str(number), cluster)
                member = [
                    sys.executable,
                    str(ROOT / "tests" / "mesh_member.py"),
                    str(folder / str(number)),
                    f"n{number}",
                    f"{NETWORK}.{10 + number}",
                ]
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", f"{PREFIX}{number}", *member],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    )
                )  # fmt: skip
                assert processes[-1].stdout is not None
                assert processes[-1].stdout.readline(), "a member does not start"
            time.sleep(5)
            before = [counted(number) for number in range(NODES)]
            cpu = [sum(psutil.Process(one.pid).cpu_times()[:2]) for one in processes[1:]]
            time.sleep(given.seconds)
            rows = [
                {
                    "node": number,
                    "bytes_per_s": (counted(number) - before[number]) / given.seconds,
                    "cpu_share": (sum(psutil.Process(one.pid).cpu_times()[:2]) - cpu[number]) / given.seconds,
                }
                for number, one in enumerate(processes[1:])
            ]
        finally:
            for one in processes:
                one.kill()
                one.communicate()
            remove_namespaces()
    lines = ["| node | bytes/s on the wire | share of a core |", "|---|---|---|"]
    lines += [f"| {row['node']} | {row['bytes_per_s']:.0f} | {row['cpu_share']:.2%} |" for row in rows]
    print("\n".join(lines))
    write_results("mesh-idle", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
