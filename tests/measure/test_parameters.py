from __future__ import annotations

import pytest

from bevctl.config.schema import Config
from bevctl.measure.parameters import count_parameters, has_norms_of_batches
from bevctl.models.build import build_model, trainable_parameters
from tests.models.nano import nano_config
from tests.models.nano_petrv2 import nano_petrv2_config

FIXED = {"model.camera.norm_eval": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(nano_config(), True), (nano_petrv2_config(), True), (nano_petrv2_config(**FIXED), False)],
    ids=["bevfusion", "petrv2", "petrv2 with fixed statistics"],
)
def test_norms_that_follow_the_batches_are_told(config: Config, expected: bool) -> None:
    assert has_norms_of_batches(config) is expected


def test_counts_are_those_of_the_model() -> None:
    config = nano_petrv2_config()
    counts = count_parameters(config)
    assert counts.by_part == trainable_parameters(build_model(config))
    assert counts.trainable == sum(counts.by_part.values())
