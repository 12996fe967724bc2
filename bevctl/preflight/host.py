"""What this machine, or the container that this process runs in, really grants: memory, cores, shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """A number and where it comes from: "this machine", "cgroup v2", …"""

    value: float
    source: str


def memory_available(root: Path = Path("/")) -> Limit:
    """Bytes of host memory that can still be taken: the kernel's estimate, or less where a cgroup limits it."""
    limits = [Limit(_meminfo(root)["MemAvailable"], "this machine")]
    for folder in _cgroups(root, "memory"):
        left = _memory_left(folder)
        if left is not None:
            limits.append(left)
    return min(limits, key=lambda limit: limit.value)


def cores(root: Path = Path("/")) -> Limit:
    """CPU cores that this process may use: its affinity, or less where a cgroup limits the time."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [Limit(float(affinity), "this machine")]
    for folder in _cgroups(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            limits.append(quota)
    return min(limits, key=lambda limit: limit.value)


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup and those above it, each of which may limit: v2 (unified), then v1."""
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            base = mount
        elif controller in names.split(","):
            base = mount / controller
        else:
            continue
        # In a container the path may be the host's, which is not mounted; the base then is the container's own.
        inside = base / path.strip("/")
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return found


def _memory_left(folder: Path) -> Limit | None:
    """What a cgroup's limit leaves; file cache that the kernel gives back at once counts as free."""
    for limit, usage, cache, version in (
        ("memory.max", "memory.current", "inactive_file", "v2"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "v1"),
    ):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            statistics = dict(line.split() for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
            return Limit(max(0, most - used + int(statistics.get(cache, 0))), f"the limit of its cgroup {version}")
    return None


def _cpu_quota(folder: Path) -> Limit | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    if len(words) == 2 and words[0] != "max":
        return Limit(int(words[0]) / int(words[1]), "the limit of its cgroup v2")
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is not None and period:
        return Limit(quota / period, "the limit of its cgroup v1")
    return None


def _number(path: Path) -> int | None:
    """The number in the file; None without the file, for "max" and for a negative one, which mean no limit."""
    words = " ".join(_lines(path)).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
