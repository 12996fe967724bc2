"""Python's search for garbage, held off where it finds none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is looked for inside: for reading, which makes millions of objects and no cycles.

    The collector would go through them again and again, and take as long as the reading.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
