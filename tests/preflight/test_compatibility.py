"""Comparing versions, and what the table says about real combinations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.preflight.compatibility import (
    mmcv_install,
    newest_capability,
    parse_version,
    problems,
    satisfies,
    table,
    torch_for_python,
)

ORDERED = [
    "0.9",
    "1.0.0.dev3",
    "1.0a1",
    "1.0.0rc1",
    "1.0.0rc6",
    "1.0",
    "1.0.post1",
    "1.0.1",
    "1.2",
    "1.10.1+cu113",
    "2",
]


@pytest.mark.parametrize(("a", "b"), list(itertools.pairwise(ORDERED)))
def test_order(a: str, b: str) -> None:
    assert satisfies(a, f"<{b}")
    assert satisfies(b, f">{a}")
    assert not satisfies(a, f">={b}")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_releases_compare_as_numbers(a: list[int], b: list[int]) -> None:
    text_a, text_b = ".".join(map(str, a)), ".".join(map(str, b))
    longest = max(len(a), len(b))
    assert satisfies(text_a, f"<{text_b}") == (a + [0] * (longest - len(a)) < b + [0] * (longest - len(b)))


@pytest.mark.parametrize("text", [None, "", "unknown", "main"])
def test_what_is_no_version(text: str | None) -> None:
    assert parse_version(text) is None
    assert satisfies(text, ">=1") is None


def test_trailing_zeros_and_local_parts_do_not_count() -> None:
    assert satisfies("1.0.0+cu118", "==1")


CLASSIC = {
    "torch": "1.12.1",
    "numpy": "1.23.5",
    "mmcv": "1.7.0",
    "mmdet": "2.28.2",
    "mmsegmentation": "0.30.0",
    "mmdet3d": "1.0.0rc6",
}
MODERN = {
    "torch": "2.5.1",
    "numpy": "1.26.4",
    "mmcv": "2.1.0",
    "mmdet": "3.3.0",
    "mmengine": "0.10.7",
    "mmdet3d": "1.4.0",
}
MIT = {"torch": "1.10.1", "numpy": "1.23.0", "mmcv": "1.4.0", "mmdet": "2.20.0", "mmdet3d": "0.0.0"}


@pytest.mark.parametrize("versions", [CLASSIC, MODERN, MIT, {}, {"torch": "2.14.1", "numpy": "1.26.4"}])
def test_combinations_that_work(versions: dict[str, str]) -> None:
    assert problems(versions, pkg_resources=True) == []


@pytest.mark.parametrize(
    ("versions", "pkg_resources", "level", "words"),
    [
        (CLASSIC | {"mmcv": "1.7.2"}, True, "fail", "mmdet3d 1.0.0rc6 with mmcv 1.7.2"),
        (CLASSIC | {"mmcv": "2.1.0"}, True, "fail", "mmdet3d 1.0.0rc6 with mmcv 2.1.0"),
        (CLASSIC | {"numpy": "1.24.0"}, True, "fail", "numpy 1.24.0"),
        (MODERN | {"mmcv": "2.2.0"}, True, "fail", "mmdet3d 1.4.0 with mmcv 2.2.0"),
        (MODERN | {"numpy": "2.1.0"}, True, "fail", "numpy 2.1.0"),
        (MODERN | {"torch": "2.6.0"}, True, "warn", "torch 2.6.0"),
        (MODERN, False, "fail", "without pkg_resources"),
        ({key: value for key, value in MODERN.items() if key != "mmdet"}, True, "fail", "mmdet3d 1.4.0 without mmdet"),
        ({"torch": "2.1.0", "numpy": "2.0.0"}, True, "fail", "torch 2.1.0"),
        ({"mmcv": "1.7.0", "mmengine": "0.10.7"}, True, "warn", "mmcv 1.7.0, mmengine 0.10.7"),
        ({"mmcv": "1.7.2", "torch": "2.13.0"}, True, "warn", "torch 2.13.0"),
        ({"nuscenes-devkit": "1.2.0", "numpy": "2.4.0"}, True, "warn", "nuscenes-devkit 1.2.0"),
        (CLASSIC | {"yapf": "0.43.0"}, True, "fail", "mmcv 1.7.0, yapf 0.43.0"),
    ],
)
def test_combinations_that_do_not(versions: dict[str, str], pkg_resources: bool, level: str, words: str) -> None:
    found = [problem for problem in problems(versions, pkg_resources) if words in problem.found]
    assert found
    assert found[0].level == level
    assert found[0].why
    assert found[0].fix


def test_what_to_install_has_operators() -> None:
    (problem,) = problems(CLASSIC | {"mmcv": "1.7.2"}, pkg_resources=True)
    assert problem.fix == "`pip install 'mmcv-full>=1.5.2,<=1.7.0'`"
    (problem, *_) = problems(MODERN | {"mmcv": "2.2.0"}, pkg_resources=True)
    assert problem.fix == "`pip install 'mmcv>=2.0.0rc4,<2.2.0'`"


def test_every_row_is_complete() -> None:
    for row in table()["needs"]:
        assert set(row) == {"package", "needs", "source"}
        assert all(satisfies("1.0", wanted) is not None for wanted in (row["package"] | row["needs"]).values())
    for row in table()["clashes"]:
        assert set(row) - {"absent"} == {"packages", "level", "why", "fix", "source"}
        assert row["level"] in ("warn", "fail")


@pytest.mark.parametrize(
    ("cuda", "capability"), [("11.3", (8, 6)), ("11.8", (9, 0)), ("12.6", (9, 0)), ("13.0", (12, 1)), ("8.0", None)]
)
def test_newest_capability(cuda: str, capability: tuple[int, int] | None) -> None:
    assert newest_capability(cuda) == capability


@pytest.mark.parametrize(
    ("versions", "python", "found"),
    [
        (CLASSIC, "3.8.18", []),
        (MODERN, "3.11.7", []),
        (CLASSIC, "3.11.7", ["mmdet3d 1.0.0rc6 on Python 3.11.7", "mmcv 1.7.0 on Python 3.11.7"]),
        (MODERN, "3.6.15", ["mmdet3d 1.4.0 on Python 3.6.15"]),
    ],
)
def test_pythons(versions: dict[str, str], python: str, found: list[str]) -> None:
    told = problems(versions, True, python)
    assert [problem.found for problem in told] == found
    assert {problem.level for problem in told} <= {"warn"}


@pytest.mark.parametrize(
    ("flavour", "version", "torch", "cuda", "wheel"),
    [
        ("mmcv-full", "1.4.0", "1.10.1", "11.3", "cu113/torch1.10"),
        ("mmcv-full", "1.7.0", "1.12.1", "10.2", "cu102/torch1.12"),
        ("mmcv-full", "1.7.0", "1.12.1", None, "cpu/torch1.12"),
        ("mmcv", "2.1.0", "2.1.2", "12.1", "cu121/torch2.1"),
        ("mmcv-full", "1.7.2", "1.12.1", "11.3", None),
        ("mmcv-full", "1.7.0", "2.0.1", "11.8", None),
        ("mmcv-full", "1.4.0", "1.12.1", "11.3", None),
        ("mmcv", "2.1.0", "2.13.0", "12.6", None),
        ("mmcv", "2.1.0", None, None, None),
    ],
)
def test_how_to_install_mmcv(
    flavour: str, version: str, torch: str | None, cuda: str | None, wheel: str | None
) -> None:
    said = mmcv_install(flavour, version, torch, cuda)
    assert f"{flavour}=={version}" in said
    assert said.endswith(f"/{wheel}/index.html`") if wheel else "there is no wheel" in said


def test_torch_of_a_python() -> None:
    assert torch_for_python("3.8.18") == ">=1.4,<=2.4.1"
    assert torch_for_python("3.13.0") == ">=2.5"
    assert torch_for_python("4.0.0") is None
    for row in table()["mmcv_wheels"]:
        assert set(row) == {"torch", "cuda", "full", "mmcv"}
    for row in table()["pythons"]:
        assert set(row) == {"package", "python", "why", "source"}
