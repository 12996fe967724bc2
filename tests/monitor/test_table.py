from pathlib import Path

import pytest
import yaml

import bevctl.explain
from bevctl.explain import explanations
from bevctl.monitor.alarms.ending import CAUSES
from bevctl.monitor.alarms.table import ALARMS
from bevctl.runs.readers.events import FAILURES


@pytest.mark.parametrize("id", ALARMS)
def test_every_alarm_is_explained(id: str) -> None:
    entry = explanations()[id]
    assert all(len(text) > 9 for text in (entry.title, entry.meaning, entry.decided, entry.do))


def test_nothing_else_is_explained_and_no_id_means_two_things() -> None:
    folder = Path(bevctl.explain.__file__).parent
    ids = {file.stem: list(yaml.safe_load(file.read_text())) for file in folder.glob("*.yaml")}
    assert set(ids["alarms"]) == set(ALARMS)
    every = [id for found in ids.values() for id in found]
    assert len(every) == len(set(every))


def test_failures_that_alarms_tell_of_are_ones_that_readers_find() -> None:
    assert {cause for causes in CAUSES.values() for cause in causes} <= set(FAILURES)
