from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bevctl.data.synth import SynthOptions, SynthSummary, make_dataset
from bevctl.data.synth.dataset import plan_scenes
from bevctl.data.synth.scene import Scene, make_scene

OPTIONS = SynthOptions(
    seed=3,
    train_scenes=1,
    val_scenes=1,
    keyframes=3,
    image_scale=0.1,
    azimuth_steps=240,
    camera_sweeps=True,
    processes=1,
)


@pytest.fixture(scope="session")
def summary(tmp_path_factory: pytest.TempPathFactory) -> SynthSummary:
    """A small data set: one training scene, one held-out scene, three keyframes each."""
    return make_dataset(tmp_path_factory.mktemp("synth"), OPTIONS)


@pytest.fixture(scope="session")
def root(summary: SynthSummary) -> Path:
    return summary.root


@pytest.fixture(scope="session")
def devkit(root: Path) -> Any:
    """The set as nuscenes-devkit opens it."""
    from nuscenes import NuScenes

    return NuScenes("v1.0-mini", str(root), verbose=False)


@pytest.fixture(scope="session")
def scenes() -> dict[str, Scene]:
    """The simulated scenes behind the data set, by name."""
    plans = plan_scenes(OPTIONS)
    return {plan.name: make_scene(plan, OPTIONS.seed, OPTIONS.keyframes) for plan in plans}
