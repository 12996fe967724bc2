from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    """A 64×36 picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (36, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()
