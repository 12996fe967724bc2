from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bevctl
from bevctl.config.load import load
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.errors import ExitCode
from tests.conftest import Outcome
from tests.data import infos as made

Invoke = Callable[..., Outcome]
SMALL = ("--train-scenes", "1", "--val-scenes", "1", "--keyframes", "2", "--image-scale", "0.05", "--processes", "1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bevctl.cli.main import run

    folder = tmp_path_factory.mktemp("data") / "synth"
    assert run(["data", "synth", str(folder), *SMALL, "-q"]) == ExitCode.OK
    return folder


def test_synth_writes_tables_and_info_files(root: Path, invoke: Invoke) -> None:
    again = invoke("data", "synth", root, *SMALL, "--json")
    assert again.code == ExitCode.OK
    document = again.document
    assert (document["schema"], document["action"], document["tables"]) == ("bevctl.data/1", "synth", "v1.0-mini")
    assert document["version"] == bevctl.__version__
    assert document["samples"] == 4
    assert [Path(file["path"]).name for file in document["files"]] == ["synth_infos_train.pkl", "synth_infos_val.pkl"]
    assert [file["samples"] for file in document["files"]] == [2, 2]
    assert (root / "v1.0-mini" / "sample.json").is_file()


def test_synth_refuses_a_folder_with_other_things(tmp_path: Path, invoke: Invoke) -> None:
    (tmp_path / "thesis.tex").touch()
    outcome = invoke("data", "synth", tmp_path, *SMALL)
    assert outcome.code == ExitCode.USAGE
    assert (tmp_path / "thesis.tex").exists()


def test_synth_checks_its_options(tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "synth", tmp_path / "new", "--keyframes", "1")
    assert outcome.code == ExitCode.USAGE
    assert "keyframes is 1" in outcome.err
    assert not (tmp_path / "new").exists()


def test_check_of_a_folder(root: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "check", "--root", root)
    assert outcome.code == ExitCode.OK
    assert invoke("data", "check", root).out == outcome.out
    for word in ("synth_infos_train.pkl", "synth_infos_val.pkl", "mmdet3d-1.1", "v1.0-mini"):
        assert word in outcome.out


def test_check_as_json(root: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "check", root / "synth_infos_val.pkl", "--json")
    assert outcome.code == ExitCode.OK
    (file,) = outcome.document["files"]
    assert (file["format"], file["version"], file["samples"]) == ("mmdet3d-1.1", "v1.0-mini", 2)
    assert file["missing"] == {}
    assert outcome.document["status"] == "ok"


def test_missing_files_are_counted(root: Path, tmp_path: Path, invoke: Invoke) -> None:
    folder = tmp_path / "part"
    shutil.copytree(root, folder)
    shutil.rmtree(folder / "samples" / "CAM_BACK")
    outcome = invoke("data", "check", "--root", folder, "--json")
    assert outcome.code == ExitCode.FINDINGS
    assert outcome.document["status"] == "fail"
    assert [file["missing"] for file in outcome.document["files"]] == [{"CAM_BACK": 2}] * 2
    assert "2 of CAM_BACK" in outcome.err


def test_files_that_were_cut_short_are_counted(root: Path, tmp_path: Path, invoke: Invoke) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(root, folder)
    cloud, picture = min((folder / "samples" / "LIDAR_TOP").iterdir()), min((folder / "samples" / "CAM_BACK").iterdir())
    cloud.write_bytes(cloud.read_bytes()[:1001])
    picture.write_bytes(picture.read_bytes()[:-700])
    outcome = invoke("data", "check", folder / "synth_infos_train.pkl", "--json")
    assert outcome.code == ExitCode.FINDINGS
    (file,) = outcome.document["files"]
    assert (file["missing"], file["damaged"]) == ({}, {"CAM_BACK": 1, "LIDAR_TOP": 2})  # as a sweep once more
    assert file["first_damaged"] == cloud.name
    assert "files are damaged: 1 of CAM_BACK, 2 of LIDAR_TOP" in outcome.err


@pytest.mark.parametrize("document", [{"images": []}, [], {"metainfo": {}, "data_list": [{}]}])
def test_an_info_file_of_another_kind(tmp_path: Path, invoke: Invoke, document: object) -> None:
    """Asked for by name it is unreadable input; met in a folder it is a finding beside the good ones."""
    path = made.write(tmp_path / "bad_infos.pkl", document)
    outcome = invoke("data", "check", path)
    assert outcome.code == ExitCode.USAGE
    assert "bad_infos.pkl" in outcome.err or "categories" in outcome.err
    made.write(tmp_path / "good_infos.pkl", made.data_list())
    folder = invoke("data", "check", "--root", tmp_path, "--json")
    assert folder.code == ExitCode.FINDINGS
    assert [Path(file["path"]).name for file in folder.document["files"]] == ["good_infos.pkl"]
    assert [Path(file["path"]).name for file in folder.document["unreadable"]] == ["bad_infos.pkl"]


def test_a_pickle_with_code_is_refused(tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "evil.pkl"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    outcome = invoke("data", "check", path, "--json")
    assert outcome.code == ExitCode.USAGE
    assert outcome.document["status"] == "error"
    assert "'os.system'" in outcome.document["error"]["message"]


def test_nothing_to_check(tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("data", "check").code == ExitCode.USAGE
    empty = invoke("data", "check", "--root", tmp_path)
    assert empty.code == ExitCode.USAGE
    assert "data prepare" in empty.err
    missing = invoke("data", "check", "--root", tmp_path / "none")
    assert missing.code == ExitCode.USAGE
    assert "data synth" in missing.err


def test_prepare(root: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "prepare", "--root", root, "--version", "v1.0-mini", "--prefix", "mine")
    assert outcome.code == ExitCode.OK
    assert "mine_infos_train.pkl: 2 samples" in outcome.out
    for split in ("train", "val"):
        (root / f"mine_infos_{split}.pkl").unlink()


@pytest.fixture
def with_database(root: Path, invoke: Invoke) -> Iterator[Outcome]:
    """The outcome of making an object database beside the data set."""
    yield invoke(
        "data", "prepare", "--root", root, "--gt-database", "--info-file", root / "synth_infos_train.pkl", "--json"
    )
    for suffix in ("npz", "bin"):
        (root / f"nuscenes_gt_database_train.{suffix}").unlink(missing_ok=True)


def test_an_object_database_is_made_and_training_pastes_from_it(root: Path, with_database: Outcome) -> None:
    assert with_database.code == ExitCode.OK
    document = with_database.document
    assert document["files"] == []
    database = document["gt_database"]
    assert database["objects"] == sum(database["per_class"].values()) > 10
    assert database["problems"] == []
    sets = [f"data.root={root}", "data.paste.min_points=1", "data.paste.counts.pedestrian=20"]
    dataset = NuScenesDataset(load("tiny", sets=sets).config, "train")
    assert "paste objects" in dataset.steps(dataset.info_at(0), 0)
    assert dataset[(0, 0)].sample is not None


def test_prepare_makes_the_database_with_the_info_files(root: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "prepare", "--root", root, "--version", "v1.0-mini", "--prefix", "mine", "--gt-database")
    assert outcome.code == ExitCode.OK
    assert "mine_gt_database_train.npz: " in outcome.out
    for path in root.glob("mine_*"):
        path.unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--info-file", "a.pkl"), "--info-file is for --gt-database"), ((), "Missing option --version")],
)
def test_prepare_needs_tables_or_an_info_file(
    root: Path, invoke: Invoke, arguments: tuple[str, ...], message: str
) -> None:
    outcome = invoke("data", "prepare", "--root", root, *arguments)
    assert outcome.code == ExitCode.USAGE
    assert message in outcome.err


def test_prepare_without_tables(tmp_path: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "prepare", "--root", tmp_path, "--version", "v1.0-mini", "--json")
    assert outcome.code == ExitCode.USAGE
    assert "no tables" in outcome.document["error"]["message"]


def test_the_real_frame(shared: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "check", "--root", shared / "nuscenes_frame", "--json")
    assert outcome.code == ExitCode.OK
    (file,) = outcome.document["files"]
    assert (file["samples"], file["boxes"], file["files"]) == (1, 69, 7)


def test_earlier_images_are_counted_apart(tmp_path: Path, invoke: Invoke) -> None:
    """Who does not train with data.previous need not have them."""
    folder = tmp_path / "set"
    options = (*SMALL[:2], "--val-scenes", "0", *SMALL[4:], "--camera-sweeps")
    assert invoke("data", "synth", folder, *options).code == ExitCode.OK
    whole = invoke("data", "check", folder / "synth_infos_train.pkl", "--json")
    assert (whole.document["files"][0]["camera_sweeps"], whole.document["files"][0]["camera_sweeps_missing"]) == (
        30,
        {},
    )
    for path in sorted((folder / "sweeps" / "CAM_BACK").iterdir())[:3]:
        path.unlink()
    part = invoke("data", "check", folder / "synth_infos_train.pkl", "--json")
    assert part.code == ExitCode.OK
    assert part.document["files"][0]["camera_sweeps_missing"] == {"CAM_BACK": 3}
    assert "earlier images are missing, which data.previous reads: 3 of CAM_BACK." in part.err
    again = invoke("data", "prepare", "--root", folder, "--version", "v1.0-mini", "--camera-sweeps", "0")
    assert again.code == ExitCode.OK
    none = invoke("data", "check", folder / "nuscenes_infos_train.pkl", "--json")
    assert none.document["files"][0]["camera_sweeps"] == 0
