from __future__ import annotations

from bevctl.config.sections import sections_of


def test_keys_with_dots_become_sections() -> None:
    values = {"optim.lr": 1e-4, "seed": 3, "data.image.flip": True, "optim.clip": None}
    assert sections_of(values) == {
        "optim": {"lr": 1e-4, "clip": None},
        "seed": 3,
        "data": {"image": {"flip": True}},
    }
