"""`bevctl eval`, on a small synthetic set with the smallest model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nuscenes.eval.common.loaders import load_prediction
from nuscenes.eval.detection.data_classes import DetectionBox
from PIL import Image

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.load import to_dict, to_yaml
from bevctl.config.schema import Config
from bevctl.data.index import read_info
from bevctl.data.prepare import prepare
from bevctl.data.synth.dataset import make_dataset
from bevctl.data.synth.options import SynthOptions
from bevctl.evaluate.detection import evaluate_detection, open_tables
from bevctl.evaluate.results import Objects
from bevctl.models.build import build_model
from tests.conftest import Outcome
from tests.models.nano import nano_config, with_value

Invoke = Callable[..., Outcome]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two held-out keyframes with tables, maps and info files."""
    root = tmp_path_factory.mktemp("data")
    options = SynthOptions(train_scenes=1, val_scenes=1, keyframes=2, image_scale=0.1, sweeps=False, processes=1)
    make_dataset(root, options)
    prepare(root, options.version, prefix="synth")
    return root


@pytest.fixture(scope="module")
def config(data: Path) -> Config:
    return nano_config(
        **{
            "data.root": str(data),
            "data.info_train": "synth_infos_train.pkl",
            "data.info_val": "synth_infos_val.pkl",
            "data.sweeps": 0,
            "train.workers": 0,
            "train.batch": 2,
        }
    )


@pytest.fixture(scope="module")
def checkpoint(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in a checkpoint that carries its config."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "epoch_1.pth"
    meta = {"format": "bevctl", "config": to_dict(config), "epoch": 1, "iter": 1}
    torch.save({"state_dict": build_model(config).state_dict(), "meta": meta}, path)
    return path


def written(config: Config, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return path


def test_json_submission_and_pictures(
    invoke: Invoke, config: Config, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    result_file, pictures = tmp_path / "out" / "results.json", tmp_path / "pictures"
    outcome = invoke(
        "eval",
        written(config, tmp_path),
        "--checkpoint",
        checkpoint,
        "--json",
        "--submission",
        result_file,
        "--show",
        pictures,
        "--show-samples",
        "1",
    )
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["schema"] == "bevctl.eval/1"
    assert document["samples"] == 2
    assert document["detection"]["ground_truth"] == "tables"
    assert 0 <= document["detection"]["mAP"] <= 1
    assert set(document["detection"]["tp_errors"]) == {"mATE", "mASE", "mAOE", "mAVE", "mAAE"}
    assert 0 <= document["map"]["mIoU"] <= 1
    infos = read_info(data / "synth_infos_val.pkl")
    tokens = [sample.token for sample in infos.samples]
    boxes, _ = load_prediction(str(result_file), 500, DetectionBox)
    assert boxes.sample_tokens == tokens
    assert [path.name for path in pictures.iterdir()] == [f"{tokens[0]}.png"]
    with Image.open(pictures / f"{tokens[0]}.png") as picture:
        assert picture.width == 1920


def test_table_without_config(
    invoke: Invoke, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke("eval", "--checkpoint", checkpoint, "--bf16")
    assert outcome.code == 0, outcome.err
    for word in ("construction_vehicle", "AVE in m/s", "drivable_area", "mAP 0.", "mIoU 0.", "2 samples"):
        assert word in outcome.out
    assert "in BF16 on cpu" in outcome.err


def test_two_ranks_say_what_one_says(
    invoke: Invoke, config: Config, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = written(config, tmp_path)
    alone = invoke("eval", path, "--checkpoint", checkpoint, "--json", "--batch", "1")
    capfd.readouterr()
    outcome = invoke(
        "eval", path, "--checkpoint", checkpoint, "--json", "--batch", "1", "--gpus", "2", "--device", "cpu"
    )
    printed = capfd.readouterr()
    assert outcome.code == 0, printed.err
    together = json.loads(printed.out)
    assert together["samples"] == 2
    # Ranks compute with one thread each, which changes sums in the last bits.
    for part, name in (("detection", "NDS"), ("detection", "tp_errors"), ("map", "mIoU"), ("map", "per_class")):
        assert together[part][name] == pytest.approx(alone.document[part][name], abs=1e-6), name


def test_a_split_without_ground_truth_gives_predictions_only(
    invoke: Invoke, config: Config, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    bare = _without_annotations(data)
    path = written(with_value(with_value(config, "data.info_val", bare.name), "model.map", None), tmp_path)
    refused = invoke("eval", path, "--checkpoint", checkpoint, "--json")
    assert refused.code == 3
    assert "--submission" in refused.document["error"]["hint"]
    outcome = invoke("eval", path, "--checkpoint", checkpoint, "--json", "--submission", tmp_path / "r.json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["detection"] is None
    assert len(json.loads((tmp_path / "r.json").read_text())["results"]) == 2


def test_wrong_use_is_refused(invoke: Invoke, config: Config, checkpoint: Path, tmp_path: Path) -> None:
    path = written(config, tmp_path)
    assert invoke("eval", path).code == 2
    missing = invoke("eval", path, "--checkpoint", tmp_path / "nothing.pth")
    assert missing.code == 2
    assert "nothing.pth" in missing.err
    blind = written(with_value(config, "model.object", None), tmp_path)
    outcome = invoke("eval", blind, "--checkpoint", checkpoint, "--submission", tmp_path / "r.json")
    assert outcome.code == 2
    assert "detection head" in outcome.err


def test_weights_that_do_not_cover_the_model_are_refused_unless_told(
    invoke: Invoke, config: Config, checkpoint: Path, tmp_path: Path
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"] = {k: v for k, v in content["state_dict"].items() if not k.startswith("heads.map")}
    torch.save(content, tmp_path / "partial.pth")
    arguments = ("eval", written(config, tmp_path), "--checkpoint", tmp_path / "partial.pth")
    refused = invoke(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert "heads.map.classifier (14)" in refused.err
    outcome = invoke(*arguments, "--min-loaded", "0.9")
    assert outcome.code == 0
    assert "keep their random values" in outcome.err


@pytest.mark.parametrize("layout", ["mit", "mmdet3d", "bevctl"])
def test_a_converted_checkpoint_scores_bit_for_bit_the_same(
    invoke: Invoke, config: Config, tmp_path: Path, layout: str
) -> None:
    """The same weights in our layout, in another one, and in ours again: equal metrics and equal boxes."""
    detection = with_value(config, "model.map", None) if layout == "mmdet3d" else config
    file = written(detection, tmp_path)
    # As another project would have saved it: their names, their boxes, kernels of spconv 2 for mmdet3d.
    torch.manual_seed(3)
    state = build_model(detection).state_dict()
    torch.save({"state_dict": state, "meta": {"format": "bevctl", "epoch": 1, "iter": 1}}, tmp_path / "ours.pth")
    assert invoke("checkpoint", "convert", tmp_path / "ours.pth", "--to", layout, "--out", tmp_path / "a.pth").code == 0
    away = torch.load(tmp_path / "a.pth", weights_only=True)
    if layout == "mmdet3d":
        kernels = {key: value for key, value in away["state_dict"].items() if value.dim() == 5}
        away["state_dict"] |= {key: value.permute(4, 0, 1, 2, 3).contiguous() for key, value in kernels.items()}
        torch.save(away, tmp_path / "a.pth")
    back = (
        "checkpoint",
        "convert",
        tmp_path / "a.pth",
        "--to",
        "bevctl",
        "--config",
        file,
        "--out",
        tmp_path / "b.pth",
    )
    assert invoke(*back).code == 0
    results = []
    for name in ("ours", "a", "b"):
        boxes = tmp_path / f"{name}.json"
        # The last file carries its config.
        given = () if name == "b" else (file,)
        outcome = invoke("eval", *given, "--checkpoint", tmp_path / f"{name}.pth", "--json", "--submission", boxes)
        assert outcome.code == 0, outcome.err
        document = {key: outcome.document[key] for key in ("detection", "map", "samples")}
        results.append((document, boxes.read_bytes()))
    assert results[0] == results[1] == results[2]
    assert all(json.loads(results[0][1])["results"].values()), "there are boxes"


def test_averaged_weights_are_the_ones_evaluated(
    invoke: Invoke, config: Config, checkpoint: Path, tmp_path: Path
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    torch.manual_seed(7)
    other = build_model(config).state_dict()
    content["ema"] = {k: v for k, v in other.items() if v.is_floating_point()}
    torch.save(content, tmp_path / "average.pth")
    torch.save({**content, "state_dict": other, "ema": None}, tmp_path / "other.pth")
    path = written(config, tmp_path)

    def predictions(weights: Path) -> str:
        file = tmp_path / "results.json"
        assert invoke("eval", path, "--checkpoint", weights, "--submission", file).code == 0
        return file.read_text()

    averaged = predictions(tmp_path / "average.pth")
    assert averaged == predictions(tmp_path / "other.pth")
    assert averaged != predictions(checkpoint)


def test_tables_and_prepared_info_file_give_the_same_numbers(data: Path) -> None:
    infos = read_info(data / "synth_infos_val.pkl")
    rng = np.random.default_rng(0)
    objects = {}
    for sample in infos.samples:
        assert sample.boxes is not None
        boxes = np.nan_to_num(sample.boxes) + rng.normal(0, 0.4, sample.boxes.shape) * (1, 1, 0, 0, 0, 0, 0.3, 1, 1)
        labels = np.array([OBJECT_CLASSES.index(name) for name in sample.names], dtype=np.int64)
        objects[sample.token] = Objects(boxes.astype(np.float32), rng.random(len(boxes)).astype(np.float32), labels)
    tables, reason = open_tables(data, infos.version, list(objects))
    assert tables is not None, reason
    by_tables = evaluate_detection(objects, infos.samples, OBJECT_CLASSES, tables)
    by_info = evaluate_detection(objects, infos.samples, OBJECT_CLASSES, None)
    assert 0.2 < by_tables.mean_ap < 0.95
    assert by_tables.tp_errors["mAAE"] is not None
    assert by_tables.mean_ap == pytest.approx(by_info.mean_ap, abs=1e-9)
    assert by_tables.nds == pytest.approx(by_info.nds, abs=1e-5)


def _without_annotations(data: Path) -> Path:
    """The held-out info file as a test split has it."""
    path = data / "bare.pkl"
    if not path.exists():
        document = pickle.loads((data / "synth_infos_val.pkl").read_bytes())
        for entry in document["data_list"]:
            del entry["instances"]
        path.write_bytes(pickle.dumps(document))
    return path


def test_the_hint_for_a_missing_checkpoint_is_not_about_resuming(invoke: Invoke, tmp_path: Path) -> None:
    missing = tmp_path / "epoch_9.pth"
    for arguments in (["eval", "--checkpoint", missing], ["eval", "tiny", "--checkpoint", missing]):
        result = invoke(*arguments)
        assert result.code == 2
        assert f"There is no checkpoint {missing}" in result.err
        assert "Give the path of a checkpoint file" in result.err
        assert "--resume" not in result.err
