from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bevctl.data.prepare import prepare
from bevctl.data.synth.dataset import make_dataset
from bevctl.data.synth.options import SynthOptions


@pytest.fixture(scope="session")
def jpeg() -> bytes:
    """A 64×36 picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (36, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def synth_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small synthetic set with info files; read only."""
    root = tmp_path_factory.mktemp("synth")
    options = SynthOptions(train_scenes=2, val_scenes=1, keyframes=3, image_scale=0.1, processes=1)
    make_dataset(root, options)
    prepare(root, options.version, prefix="synth")
    return root
