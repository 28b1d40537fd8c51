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

from mesh_lists import Members
from mosquitto import PROGRAM
from namespaces import network

NAMES = ("n0", "n1", "n2", "n3")


def counted(space: str) -> int:
    """Return the bytes of the card of a namespace, both ways."""
    folder = Path(f"/sys/class/net/{space}/statistics")
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    need_mesh(in_networks=True)
    with tempfile.TemporaryDirectory() as temporary, network(NAMES) as net:
        folder = Path(temporary)
        processes: list[subprocess.Popen[str]] = []
        settings = f"user root\nlistener 18893 {net.here}\nallow_anonymous true\npersistence false\n"
        (folder / "mosquitto.conf").write_text(settings)
        try:
            broker = subprocess.Popen([PROGRAM or "", "-c", str(folder / "mosquitto.conf")], stderr=subprocess.DEVNULL)
            processes.append(broker)  # type: ignore[arg-type]
            time.sleep(1)
            members = Members(f"mqtt://{net.here}:18893")
            for name, address in net.addresses.items():
                place = str(members.move_into(folder / name))
                member = [sys.executable, str(ROOT / "tests" / "mesh_member.py"), place, name, address]
                processes.append(
                    subprocess.Popen(
                        [*net.wrap(name), *member], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
                assert processes[-1].stdout is not None
                assert processes[-1].stdout.readline(), "a member does not start"
            time.sleep(5)
            before = [counted(net.space(name)) for name in NAMES]
            cpu = [sum(psutil.Process(one.pid).cpu_times()[:2]) for one in processes[1:]]
            time.sleep(given.seconds)
            rows = [
                {
                    "node": number,
                    "bytes_per_s": (counted(net.space(NAMES[number])) - before[number]) / given.seconds,
                    "cpu_share": (sum(psutil.Process(one.pid).cpu_times()[:2]) - cpu[number]) / given.seconds,
                }
                for number, one in enumerate(processes[1:])
            ]
        finally:
            for one in processes:
                one.kill()
                one.communicate()
    lines = ["| node | bytes/s on the wire | share of a core |", "|---|---|---|"]
    lines += [f"| {row['node']} | {row['bytes_per_s']:.0f} | {row['cpu_share']:.2%} |" for row in rows]
    print("\n".join(lines))
    write_results("mesh-idle", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()
