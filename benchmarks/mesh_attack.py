"""What a device holds while it is attacked: the resident memory of a real member, before, at its peak, and after.

Strangers come to the data link's port with noise and with keys that nobody knows, and to the broker with control
messages that were heard there, said again, cut short, with a wrong bit, on other topics, and with noise. Then a member
that went wrong, whose key is known, sends what cannot be: truncated, foreign, oversized, with gaps, in too many parts;
and more than anybody takes. It announces a key that is none and ports of the device itself, and connects more often
than the device may have files open (256). Afterwards the device must still answer another member. Then the same with
the embedded broker, whose process is measured too: strangers, and members that went wrong, fill it. Needs mosquitto;
the peak is measured from the start of each attack on (`/proc/PID/clear_refs`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

from _attack import Attack, Attacks, Victim
from _box import ROOT, table, write_results
from _broker_attacks import BROKER_ATTACKS, MOST_SPEAKERS
from _link_attacks import LINK_ATTACKS
from _mesh_box import need_mesh
from _usage import forget_peak, peak_bytes, resident_bytes

sys.path.insert(0, str(ROOT / "tests"))

from edge_run.base.errors import EdgeRunError
from edge_run.base.units import MIB
from edge_run.devices.broker.embedded import EmbeddedBroker
from edge_run.devices.mesh.node import LocalNode
from edge_run.devices.mesh.opening import MeshConfig, open_mesh
from edge_run.devices.mesh.serving import access_of
from mesh_lists import Members
from mosquitto import Mosquitto

WHEN = ("before", "peak", "after")
Rows: TypeAlias = list[dict[str, Any]]


def is_well(here: LocalNode, victim: Victim) -> bool:
    """Whether the victim still answers."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            here.link.send(victim.node, {"still": "here"}, timeout_s=5)
            while (message := here.link.receive(timeout_s=2)) is not None:
                if message.header == {"still": "here"}:
                    return True
        except EdgeRunError:
            time.sleep(0.5)
    return False


def meet(folder: Path, members: Members, port: int, attacks: Attacks, broker: int) -> Rows:
    """Carry out `attacks` on a victim among `members`, and on the process `broker` of their broker, where it is ours.

    Those at the broker come as the members that have no folder.
    """
    rows: Rows = []
    for name in ("here", "rogue", "victim"):
        members.move_into(folder / name)
    victim = Victim(folder / "victim")
    here, rogue = (open_mesh(MeshConfig(folder=folder / name, name=name)) for name in ("here", "rogue"))
    try:
        until = time.monotonic() + 10
        while min(len(here.members()), len(rogue.members())) < 3 and time.monotonic() < until:
            time.sleep(0.1)
        attack = Attack(rogue, victim, port, members)
        processes = {"device": victim.process.pid, **({"broker": broker} if broker else {})}
        for what, act in attacks.items():
            before = {}
            for name, process in processes.items():
                forget_peak(process)
                before[name] = resident_bytes(process)
            act(attack)
            row: dict[str, Any] = {"attack": what}
            for name, process in processes.items():
                now, peak = resident_bytes(process), peak_bytes(process)
                sizes = (before[name], peak, now)
                row |= {f"{name}_{when}_mib": round(n / MIB) for when, n in zip(WHEN, sizes, strict=True)}
            rows.append({**row, "answers after it": is_well(here, victim)})
            print(rows[-1], flush=True)
    finally:
        here.close()
        rogue.close()
        victim.process.kill()
        victim.process.wait()
    return rows


def shown(rows: Rows) -> str:
    """Return a table, whose heads need no units."""
    named = [{name.replace("_", " ").removesuffix(" mib"): figure for name, figure in row.items()} for row in rows]
    return table(list(named[0]) if named else [], named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    need_mesh()

    def chosen(attacks: Attacks) -> Attacks:
        return {what: act for what, act in attacks.items() if given.only in what}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        broker = Mosquitto(folder)
        broker.start()
        try:
            rows = meet(folder / "1", Members(broker.url), broker.port, chosen(LINK_ATTACKS), 0)
        finally:
            broker.stop()
        place = f"127.0.0.1:{broker.port}"
        members = Members(f"mqtt://{place}", place, spare=MOST_SPEAKERS + 3)
        access = access_of(members.cluster, members.founder)
        with contextlib.closing(EmbeddedBroker("127.0.0.1", broker.port, access)) as embedded:
            more = meet(folder / "2", members, broker.port, chosen(BROKER_ATTACKS), embedded.process_id)
    if not given.only:
        text = f"{__doc__}\nResident memory in MiB.\n\n{shown(rows)}\n\nWith the embedded broker:\n\n{shown(more)}"
        write_results("mesh-attack", [*rows, *more], text)


if __name__ == "__main__":
    main()
