"""Writes golden/ anew: `python -m tests.external.make_golden`. Read the difference before you commit it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import trees
from .test_launch import CASES, GOLDEN, text_of


def main() -> None:
    for kind in trees.KINDS:
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                (GOLDEN / f"{kind}_{name}.txt").write_text(text_of(Path(folder), kind, case), encoding="utf-8")


if __name__ == "__main__":
    main()
