"""Checks of this device for `doctor`: its memory, and the kernel's settings for memory. A check changes nothing.

`root` is where procfs and sysfs are found, for tests. A file that is missing, as on other systems, gives no finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_run.base.units import KIB, MIB, format_count, format_size
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding
from edge_run.devices.host.ledger import Ledger, Run
from edge_run.devices.host.machine import usable_cores
from edge_run.devices.host.memory import memory_groups
from edge_run.devices.host.system_files import system_text

USUAL_MAP_COUNT = 65530
LEAST_BUDGET_BYTES = 256 * MIB
MUCH_TIME = 0.05  # of the processor time that was asked for: so much taken by a host changes what is measured
_SETS_ITS_OWN_SPEED = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")  # `powersave` is their normal governor


def check_memory(total_bytes: int, budget_bytes: int) -> Finding:
    """What a run would have without --memory."""
    text = f"{format_size(total_bytes)} in all, {format_size(budget_bytes)} of it for a run without --memory"
    if budget_bytes < LEAST_BUDGET_BYTES:
        return Finding("memory", PROBLEM, text, "end other programs, or raise the limit of the container")
    return Finding("memory", OK, text)


def check_groups(root: Path = Path("/")) -> list[Finding]:
    """The limits of control groups: containers, systemd units."""
    limits = {group.folder: group.limit_bytes for group in memory_groups("self", root)}
    return [
        Finding(
            "memory limit",
            NOTE,
            f"{format_size(limit)} for the control group {folder}; budgets stay below it",
            "to have more: docker run --memory, MemoryMax= of a systemd unit",
        )
        for folder, limit in limits.items()
        if limit is not None
    ]


def check_quota(root: Path = Path("/")) -> Finding | None:
    """A limit of processor time: containers, systemd units."""
    cores = usable_cores(root)
    if cores.quota == cores.logical:
        return None
    threads = format_count(cores.at_once, "thread")
    text = f"control groups leave the time of {cores.quota:g} of {cores.logical} processors: {threads} by default"
    return Finding("processor time", NOTE, text, "to have more: docker run --cpus, CPUQuota= of a systemd unit")


def check_host(root: Path = Path("/")) -> Finding | None:
    """What the host of a virtual machine took of the processor time that was asked for, since the machine started."""
    fields = next((line.split() for line in _lines(root / "proc/stat") if line.startswith("cpu ")), [])
    ticks = [int(field) for field in fields[1:9] if field.isdecimal()]
    if len(ticks) < 8 or not ticks[7]:  # real machines have none
        return None
    user, nice, system, _, _, interrupts, softirqs, stolen = ticks
    share = stolen / (user + nice + system + interrupts + softirqs + stolen)
    text = f"the host took {100 * share:.1f} % of the processor time that was asked for since the machine started"
    if share < MUCH_TIME:
        return Finding("host", OK, text)
    advice = "speeds change with its other guests: trust bench more than plan, or ask for processors of your own"
    return Finding("host", NOTE, text, advice)


def check_runs(ledger: Ledger) -> list[Finding]:
    """The models that are open now."""
    if not ledger.folders:
        why = "no folder of this user's own for a ledger of budgets: two runs could together exceed memory"
        return [
            Finding(
                "other runs", NOTE, why, "make /run/user or /tmp writable, or name a folder of this user's in TMPDIR"
            )
        ]
    runs = ledger.runs()
    if not runs:
        return [Finding("other runs", OK, "none")]
    return [
        Finding(
            "other runs",
            OK,
            f"process {run.pid} with {', '.join(run.models)}: granted {format_size(run.granted_bytes)}, holds "
            f"{format_size(run.held_bytes)}",
        )
        for run in runs
    ]


def check_swap(root: Path = Path("/")) -> Finding | None:
    """Where the kernel may put weights that are meant to stay in memory."""
    lines = [line.split() for line in _lines(root / "proc/swaps")[1:]]
    if not (root / "proc/swaps").exists():
        return None
    if not lines:
        return Finding("swap", OK, "off")
    size = format_size(sum(int(line[2]) * KIB for line in lines))
    if all("zram" in line[0] for line in lines):
        text = f"{size} of zram: under pressure the kernel compresses weights in memory, which makes no room"
    else:
        text = (
            f"{size} on {', '.join(line[0] for line in lines)}: under pressure the kernel writes weights to the drive"
        )
    return Finding("swap", NOTE, text, "sudo sysctl vm.swappiness=1, or sudo swapoff -a while models run")


def check_swapped(runs: Sequence[Run], root: Path = Path("/")) -> list[Finding]:
    """Runs of which a part was swapped out already."""
    findings = []
    for run in runs:
        fields = [line.split() for line in _lines(root / f"proc/{run.pid}/status") if line.startswith("VmSwap:")]
        swapped_bytes = int(fields[0][1]) * KIB if fields else 0
        if swapped_bytes >= MIB:
            text = f"{format_size(swapped_bytes)} of process {run.pid} ({', '.join(run.models)}) is swapped out"
            findings.append(Finding("swap", PROBLEM, text, "start it again with a lower --memory, or turn swap off"))
    return findings


def check_overcommit(budget_bytes: int, root: Path = Path("/")) -> Finding | None:
    """Whether the kernel refuses memory that is there."""
    mode = _number(root / "proc/sys/vm/overcommit_memory")
    if mode is None:
        return None
    if mode != 2:
        return Finding("overcommit", OK, f"vm.overcommit_memory is {mode}")
    facts = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    limit, used = (int(facts.get(key, "0").split()[0]) * KIB for key in ("CommitLimit", "Committed_AS"))
    text = (
        f"vm.overcommit_memory is 2: of {format_size(limit)} that programs may ask for, "
        f"{format_size(max(0, limit - used))} is left"
    )
    state = PROBLEM if limit - used < budget_bytes else NOTE
    return Finding("overcommit", state, text, "sudo sysctl vm.overcommit_memory=0, or a lower --memory")


def check_map_count(root: Path = Path("/"), needed: int = 0) -> Finding | None:
    """How many ranges a process may map; a streamed model's chunks can be one each."""
    count = _number(root / "proc/sys/vm/max_map_count")
    if count is None:
        return None
    wanted = max(USUAL_MAP_COUNT, needed)
    text = f"vm.max_map_count is {count}"
    if count >= wanted:
        return Finding("mappings", OK, text)
    return Finding("mappings", NOTE, f"{text}, {wanted} may be needed", f"sudo sysctl vm.max_map_count={2 * wanted}")


def check_huge_pages(root: Path = Path("/")) -> Finding | None:
    """Whether frames can be huge pages, which are read into with a quarter of the processor time."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = system_text(path)
    if not text:
        return None
    if "[never]" not in text:
        return Finding("huge pages", OK, f"transparent huge pages: {text}")
    advice = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", NOTE, "transparent huge pages are off: reading takes more processor time", advice)


def check_lock_limit() -> Finding | None:
    """The limit that other programs stumble over."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = "any amount" if limit == resource.RLIM_INFINITY else format_size(limit)
    return Finding("locked memory", OK, f"{size} may be locked; edge-run locks none")


def check_governor(root: Path = Path("/")) -> Finding | None:
    """Whether the processor is kept slow."""
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu*/cpufreq"))
    governors = {
        system_text(folder / "scaling_governor")
        for folder in folders
        if system_text(folder / "scaling_driver") not in _SETS_ITS_OWN_SPEED
    }
    if not folders:
        return None
    if "powersave" not in governors:
        return Finding("processor speed", OK, f"governor {', '.join(sorted(governors - {''})) or 'of the processor'}")
    return Finding(
        "processor speed",
        NOTE,
        "governor powersave: the processor stays at its lowest speed",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    )


def _lines(path: Path) -> list[str]:
    return system_text(path).splitlines()


def _number(path: Path) -> int | None:
    text = system_text(path)
    return int(text) if text.isdecimal() else None
