"""Versions of packages: comparing them, and the table (compatibility.yaml) of which run together."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Version = tuple[tuple[int, ...], int, int]
"""Release numbers without trailing zeros, phase (below 0 before the release, 0 at it, 1 after), number in the phase."""

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)[-._]?(dev|a|alpha|b|beta|rc|post)?[-._]?(\d*)")
_PHASES = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1, "": 0, "post": 1}
_COMPARE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
MMCV_FLAVOURS = ("mmcv-full", "mmcv", "mmcv-lite")


def parse_version(text: str | None) -> Version | None:
    """The version that `text` starts with, without a local part (+cu118); None where it is none."""
    match = _VERSION.match(text or "")
    if match is None:
        return None
    numbers = tuple(int(part) for part in match[1].split("."))
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    return numbers, _PHASES[match[2] or ""], int(match[3] or 0) if match[2] else 0


def satisfies(version: str | None, wanted: str) -> bool | None:
    """Whether `version` lies in a range such as ">=1.4,<2"; None where the version cannot be read."""
    have = parse_version(version)
    if have is None:
        return None
    return all(_compare(have, part) for part in wanted.split(",") if part.strip())


def _compare(have: Version, part: str) -> bool:
    match = _COMPARE.fullmatch(part)
    bound = parse_version(match[2]) if match else None
    if match is None or bound is None:
        raise ValueError(f"not a version range: {part!r}")
    return {
        ">=": have >= bound,
        "<=": have <= bound,
        "==": have == bound,
        "!=": have != bound,
        ">": have > bound,
        "<": have < bound,
    }[match[1]]


@dataclass(frozen=True)
class Problem:
    """Packages that do not run together."""

    packages: tuple[str, ...]
    level: str
    """fail or warn."""
    found: str
    why: str
    fix: str
    source: str


@functools.lru_cache(maxsize=1)
def table() -> Mapping[str, Any]:
    """The content of compatibility.yaml."""
    import yaml

    content = yaml.safe_load(Path(__file__).with_name("compatibility.yaml").read_text())
    assert isinstance(content, dict)
    return content


def versions_by_project(packages: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Project → version of what the probe found; "mmcv" stands for the flavour that is installed."""
    versions = {name: str(package["version"]) for name, package in packages.items()}
    flavour = next((name for name in MMCV_FLAVOURS if name in versions), None)
    return versions | ({"mmcv": versions[flavour]} if flavour else {})


def problems(versions: Mapping[str, str], pkg_resources: bool, python: str | None = None) -> list[Problem]:
    """Everything in `versions`, and of them and this Python, that the table says does not run together."""
    return [*_unmet_needs(versions), *_clashes(versions, pkg_resources), *_other_pythons(versions, python)]


def _other_pythons(versions: Mapping[str, str], python: str | None) -> Iterator[Problem]:
    """Releases that were made for another Python; they may run nevertheless, once they are built."""
    for row in table()["pythons"]:
        if python is None or not _matches(versions, row["package"]) or satisfies(python, row["python"]) is not False:
            continue
        owner = _named(versions, row["package"])
        fix = f"Make an environment with Python {row['python']}, or leave the check out where it works."
        why = f"{owner} is made for Python {row['python']}: {row['why']}"
        yield Problem(tuple(row["package"]), "warn", f"{owner} on Python {python}", why, fix, row["source"])


def mmcv_install(flavour: str, version: str, torch: str | None, cuda: str | None) -> str:
    """How to install an mmcv with operators for a torch: its wheel where there is one, else how to build it.

    Args:
        flavour: mmcv-full, or mmcv from 2.0 on.
        cuda: the CUDA version that torch was built for ("11.3"), None for a CPU build.
    """
    column = "full" if flavour == "mmcv-full" else "mmcv"
    for row in table()["mmcv_wheels"]:
        has_wheel = bool(row[column]) and satisfies(version, row[column])
        if has_wheel and satisfies(torch, row["torch"]) and (cuda or "cpu") in row["cuda"]:
            build = f"cu{cuda.replace('.', '')}" if cuda else "cpu"
            release = ".".join(str(torch).split(".")[:2])
            index = f"https://download.openmmlab.com/mmcv/dist/{build}/torch{release}/index.html"
            return f"`pip install {flavour}=={version} -f {index}`"
    build = f"`MMCV_WITH_OPS=1 pip install --no-build-isolation --no-deps {flavour}=={version}`"
    target = f"torch {torch} with {f'CUDA {cuda}' if cuda else 'CPUs'}"
    return f"{build}: there is no wheel for {target}, it is built (first setuptools below 81, ninja and psutil)"


def torch_for_python(python: str) -> str | None:
    """The torch releases with wheels for a Python ("3.8.18"), as a range; None for one that is not in the table."""
    found: str | None = table()["torch_pythons"].get(".".join(python.split(".")[:2]))
    return found


def _matches(versions: Mapping[str, str], ranges: Mapping[str, str]) -> bool:
    return all(name in versions and satisfies(versions[name], wanted) for name, wanted in ranges.items())


def _named(versions: Mapping[str, str], names: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _unmet_needs(versions: Mapping[str, str]) -> Iterator[Problem]:
    for row in table()["needs"]:
        if not _matches(versions, row["package"]):
            continue
        owner = _named(versions, row["package"])
        for name, wanted in row["needs"].items():
            have = versions.get(name)
            if have is None or satisfies(have, wanted) is False:
                found = f"{owner} with {name} {have}" if have else f"{owner} without {name}"
                why = f"{owner} needs {name} {wanted}."
                fix = f"`pip install {_requirement(name, wanted)}`"
                yield Problem((*row["package"], name), "fail", found, why, fix, row["source"])


def _requirement(name: str, wanted: str) -> str:
    """What to install; mmcv 1 has its operators in mmcv-full."""
    modern = any(satisfies(version, wanted) for version in ("2.0.1", "2.1.0"))
    return f"'{'mmcv-full' if name == 'mmcv' and not modern else name}{wanted}'"


def _clashes(versions: Mapping[str, str], pkg_resources: bool) -> Iterator[Problem]:
    for row in table()["clashes"]:
        missing = row.get("absent")
        if not _matches(versions, row["packages"]) or (missing == "pkg_resources" and pkg_resources):
            continue
        found = _named(versions, row["packages"]) + (f" without {missing}" if missing else "")
        yield Problem(tuple(row["packages"]), row["level"], found, row["why"], row["fix"], row["source"])


def newest_capability(cuda: str) -> tuple[int, int] | None:
    """Newest compute capability that a CUDA toolkit of this version ("11.8") compiles for; None before the table."""
    have = parse_version(cuda)
    rows = [(parse_version(version), capability) for version, capability in table()["cuda_capability"].items()]
    known = [capability for version, capability in rows if have and version and version <= have]
    return max(((capability[0], capability[1]) for capability in known), default=None)
