"""Commands on a PETRv2 that sees two moments: what they do with any model, they do with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.config.load import to_yaml
from bevctl.monitor.alarms.table import ALARMS
from tests.conftest import Outcome
from tests.models.nano_petrv2 import nano_petrv2_config

Invoke = Callable[..., Outcome]
pytestmark = pytest.mark.usefixtures("one_thread")
PARTS = {"encoders.camera.backbone", "encoders.camera.neck", "encoders.camera.position", "heads.object", "heads.map"}


@pytest.fixture(scope="module")
def config(synth_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both tasks, on the synthetic set; the earlier moment is a keyframe's."""
    values = nano_petrv2_config(
        **{
            "data.root": str(synth_root),
            "data.info_train": "synth_infos_train.pkl",
            "data.info_val": "synth_infos_val.pkl",
            "data.previous.source": "keyframes",
            "data.previous.train": (0, 1),
            "data.previous.eval": 0,
            "train.workers": 0,
            "train.batch": 2,
            "train.eval_interval": 0,
            "train.log_interval": 1,
        }
    )
    path = tmp_path_factory.mktemp("petrv2") / "nano.yaml"
    path.write_text(to_yaml(values))
    return path


@pytest.fixture
def run(invoke: Invoke, config: Path) -> Path:
    """A run of two iterations, made once."""
    folder = config.parent / "run"
    if not folder.exists():
        outcome = invoke("train", config, "--work-dir", folder, "--max-iters", "2")
        assert outcome.code == 0, outcome.err
        assert "have no earlier images" in outcome.err
    return folder


def test_training_starts_from_its_weights(invoke: Invoke, config: Path, run: Path, tmp_path: Path) -> None:
    outcome = invoke(
        "train", config, "--work-dir", tmp_path / "again", "--load-from", run / "latest", "--max-iters", "1"
    )
    assert outcome.code == 0, outcome.err
    assert "heads.object" in outcome.err


def test_monitor_and_diagnose_read_it(invoke: Invoke, run: Path) -> None:
    document = invoke("monitor", run, "--once", "--json").document
    assert document["state"] == "finished"
    assert not [alarm for alarm in document["alarms"] if alarm["severity"] == "fail"]
    assert {"loss/object/layer_0_loss_cls", "loss/object/layer_-1_loss_bbox"} <= document["metrics"].keys()
    assert "NAN006" in ALARMS
    for topic in ("nan", "fp16-inactive", "oom", "hang"):
        outcome = invoke("diagnose", topic, run, "--json")
        assert outcome.document["status"] == "clear", (topic, outcome.out)


def test_evaluation_scores_both_tasks_and_draws(invoke: Invoke, run: Path, tmp_path: Path) -> None:
    outcome = invoke("eval", "--checkpoint", run / "latest", "--show", tmp_path / "pictures", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["detection"]["mAP"] >= 0
    assert set(outcome.document["map"]["per_class"]) == {"drivable_area", "divider", "vehicle"}
    assert list((tmp_path / "pictures").glob("*.png"))


def test_weights_written_for_petr_score_the_same(invoke: Invoke, config: Path, run: Path, tmp_path: Path) -> None:
    theirs, back = tmp_path / "petr.pth", tmp_path / "back.pth"
    for source, target, layout in ((run / "latest", theirs, "petr"), (theirs, back, "bevctl")):
        outcome = invoke("checkpoint", "convert", source, "--to", layout, "--task", "map", "--out", target)
        assert outcome.code == 0, outcome.err
    assert "petr layout" in invoke("checkpoint", "show", theirs).out
    alone = ("--set", "model.object=null")
    documents = [
        invoke("eval", config, "--checkpoint", file, *alone, "--json", "--min-loaded", "1").document["map"]
        for file in (theirs, back)
    ]
    full = invoke("eval", "--checkpoint", run / "latest", "--json").document["map"]
    assert documents == [full, full]


def test_bench_and_memory_know_its_parts(invoke: Invoke, config: Path) -> None:
    quick = ("--batch", "1", "--steps", "1", "--precision", "fp32", "--device", "cpu")
    outcome = invoke("bench", config, *quick, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["results"][0]["split"]["forward_by_part"].keys() >= PARTS
    outcome = invoke("memory", config, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["parameters"]["by_part"].keys() == PARTS
    assert {component["name"] for component in outcome.document["components"]} >= PARTS


def test_preflight_looks_at_both_moments_and_at_the_weights(invoke: Invoke, config: Path, run: Path) -> None:
    start = f"model.load_from=[{run / 'latest'}]"
    outcome = invoke("preflight", config, "--device", "cpu", "--set", start, "--json")
    checks = {check["id"]: check for check in outcome.document["checks"]}
    assert checks["DATA010"]["status"] == "pass", checks["DATA010"]
    assert checks["FILE009"]["status"] == "pass", checks["FILE009"]
    assert outcome.document["status"] in ("pass", "warn", "unknown"), json.dumps(outcome.document, indent=1)
