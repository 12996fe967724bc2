"""The command line and the overlay of each kind of tree, word by word (golden/), and what decides them."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from bevctl.errors import BevctlError
from bevctl.external.interpreter import RUN_MARK, applied, environment_of
from bevctl.external.launch import shown_command

from . import trees

GOLDEN = Path(__file__).with_name("golden")
CASES: dict[str, dict[str, Any]] = {
    "as_it_is": {"gpus": 8},
    "fp16": {"gpus": 8, "precision": "fp16", "batch": 2, "workers": 6, "lr_scaling": "linear"},
    "fp32": {"gpus": 8, "precision": "fp32", "epochs": 3},
    "resume": {"gpus": 2, "precision": "fp16", "resume": True},
    "single": {"gpus": 1, "lr": 5e-5, "overrides": (("model.x", [1, "a"]), ("MODEL.y", "none"))},
}


def text_of(tmp_path: Path, kind: str, case: dict[str, Any]) -> str:
    """The command and the overlay of a case, as golden files hold them."""
    root = tmp_path / "tree"
    wanted = {key: value for key, value in case.items() if key != "resume"}
    launch = trees.plan(root, trees.KINDS[kind](root), **wanted)
    resume = tmp_path / "old" / "epoch_1.pth" if "resume" in case else None
    lines = [shlex.join(trees.command(launch, resume))]
    if launch.overlay is not None:
        overlay = launch.overlay.text.replace(str(root), "TREE").replace(str(tmp_path), "")
        lines += [f"# {str(launch.overlay.path).replace(str(tmp_path), '')}", overlay]
    return "\n".join(lines).rstrip() + "\n"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", trees.KINDS)
def test_command_line(tmp_path: Path, kind: str, case: str) -> None:
    expected = GOLDEN / f"{kind}_{case}.txt"
    assert text_of(tmp_path, kind, CASES[case]) == expected.read_text(encoding="utf-8")


def test_overlays_are_what_they_say(tmp_path: Path) -> None:
    """The Python of an overlay is plain assignments, its YAML the project's file with the change alone."""
    for number, (kind, build) in enumerate(trees.KINDS.items()):
        root = tmp_path / str(number) / "tree"
        config = build(root)
        config.write_text(config.read_text().replace("GRAD_NORM_CLIP: 10", "USE_AMP: true"))
        launch = trees.plan(root, config, gpus=8, precision="fp32", clip=1.0, batch=1)
        if kind == "mit-bevfusion":
            assert launch.overlay is None
            continue
        assert launch.overlay is not None
        assert launch.overlay.path.name == config.name
        assert not launch.overlay.path.is_relative_to(root)
        if kind == "openpcdet":
            optimization = yaml.safe_load(launch.overlay.text)["OPTIMIZATION"]
            assert (optimization["USE_AMP"], optimization["GRAD_NORM_CLIP"], optimization["LR"]) == (False, 1.0, 0.001)
        else:
            assert all(isinstance(node, ast.Assign) for node in ast.parse(launch.overlay.text).body)


@pytest.mark.parametrize(
    ("build", "torch", "gpus", "launcher"),
    [
        (trees.mit, "1.10.1", 8, "torchpack"),
        (trees.mit, "1.10.1", 1, "torchpack"),
        (lambda root: trees.mit(root, "import mmcv"), "1.10.1", 8, "torchrun"),
        (trees.mmdet3d_0, "1.12.1", 8, "torchrun"),
        (trees.mmdet3d_0, "1.8.1", 8, "torch.distributed.launch"),
        (trees.mmdet3d_0, "1.12.1", 1, "none"),
        (trees.mmdet3d_1, None, 2, "torchrun"),
        (lambda root: trees.openpcdet(root, "cfg.LOCAL_RANK"), "1.12.1", 8, "torch.distributed.launch"),
        (trees.openpcdet, "2.4.0", 8, "torchrun"),
    ],
)
def test_launcher(tmp_path: Path, build: Any, torch: str | None, gpus: int, launcher: str) -> None:
    root = tmp_path / "tree"
    assert trees.plan(root, build(root), torch, gpus=gpus).launcher == launcher


def test_a_script_and_a_torch_that_do_not_agree_on_the_rank(tmp_path: Path) -> None:
    config = trees.openpcdet(tmp_path / "tree", "cfg.LOCAL_RANK")
    with pytest.raises(BevctlError, match="learns its rank from --local_rank alone"):
        trees.plan(tmp_path / "tree", config, "2.1.0", gpus=2)


def test_openpcdet_counts_the_gpus_that_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = trees.openpcdet(tmp_path / "tree")
    assert trees.plan(tmp_path / "tree", config, gpus=2).environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert trees.plan(tmp_path / "tree", config, gpus=2).environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert "CUDA_VISIBLE_DEVICES" not in trees.plan(tmp_path / "tree", config, gpus=1).environment


def test_environment(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    launch = trees.plan(root, trees.mmdet3d_0(root))
    prefix = launch.interpreter.prefix
    trees.write(prefix / "conda-meta" / "history")
    (prefix / "lib" / "python3.8" / "site-packages" / "torch" / "lib").mkdir(parents=True)
    ours = {
        "PATH": f"/usr/bin:{prefix / 'bin'}",
        "PYTHONPATH": "/other",
        "VIRTUAL_ENV": "/bevctl",
        "BEVCTL_TRAIN_BATCH": "4",
        "HOME": "/home/me",
    }
    environment = environment_of(launch.interpreter, launch.tree, tmp_path / "run", None, ours)
    assert applied(environment, ours) == {
        "PATH": f"{prefix / 'bin'}:/usr/bin",
        "PYTHONPATH": f"{root}:/other",
        "LD_LIBRARY_PATH": f"{prefix / 'lib'}:{prefix / 'lib' / 'python3.8' / 'site-packages' / 'torch' / 'lib'}",
        "CONDA_PREFIX": str(prefix),
        "CONDA_DEFAULT_ENV": "env",
        "HOME": "/home/me",
        "PYTHONUNBUFFERED": "1",
        RUN_MARK: str(tmp_path / "run"),
    }
    shown = shown_command(["python", "a b"], root, {"PATH": "/x y", "VIRTUAL_ENV": None})
    assert shown == [f"cd {root}", "export PATH='/x y'", "unset VIRTUAL_ENV", "python 'a b'"]


def test_torchpack_muted_ranks_need_plain_words(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    config = trees.mit(root)
    assert "-v" not in trees.plan(root, config, gpus=8).command(None, 0)
    assert "-v" in trees.plan(root, config, gpus=8).command(tmp_path / "with space.pth", 0)


def test_torchpack_sets_no_key_below_a_null(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    config = trees.mit(root)
    config.write_text(config.read_text() + "fp16: null\noptimizer_config: null\n")
    said = shlex.join(trees.command(trees.plan(root, config, precision="fp16", clip=5.0)))
    assert "--fp16 '{}' --fp16.loss_scale '{}' --fp16.loss_scale.growth_interval 2000" not in said
    assert "--fp16 '{}' --fp16.loss_scale.growth_interval 2000" in said
    assert "--optimizer_config '{}' --optimizer_config.grad_clip.max_norm 5.0" in said


def test_resume_of_the_first_mmdet3d_1(tmp_path: Path) -> None:
    """There `--resume` is a switch; the file is the one that load_from names."""
    options = tuple(option for option in trees.MMENGINE_OPTIONS if option != "--resume")
    config = trees.mmdet3d_1(tmp_path / "tree", options)
    script = tmp_path / "tree" / "tools" / "train.py"
    script.write_text(script.read_text() + "parser.add_argument('--resume', action='store_true')\n")
    said = trees.command(trees.plan(tmp_path / "tree", config), Path("/a.pth"))
    assert said[said.index("--resume") :] == ["--resume", "--launcher", "none", "--cfg-options", "load_from=/a.pth"]


def test_a_config_that_imports_its_bases_gets_options(tmp_path: Path) -> None:
    config = trees.mmdet3d_1(tmp_path / "tree")
    config.write_text("from mmdet3d.models import BEVFusion\n" + config.read_text())
    launch = trees.plan(tmp_path / "tree", config, precision="fp16", batch=2, workers=0)
    assert launch.overlay is None
    said = trees.command(launch)
    assert said[said.index("--amp") :] == [
        "--amp",
        "--launcher",
        "none",
        "--cfg-options",
        "train_dataloader.batch_size=2",
        "train_dataloader.num_workers=0",
        "train_dataloader.persistent_workers=False",
    ]
    config.write_text(config.read_text().replace("'OptimWrapper'", "'AmpOptimWrapper'"))
    with pytest.raises(BevctlError, match="no file can be laid over"):
        trees.plan(tmp_path / "tree", config, precision="fp32")


def test_a_plugin_without_a_folder_stays_where_its_config_is(tmp_path: Path) -> None:
    config = trees.petr(tmp_path / "tree")
    config.write_text(config.read_text().replace("plugin_dir = 'projects/mmdet3d_plugin/'\n", ""))
    launch = trees.plan(tmp_path / "tree", config, batch=2)
    assert launch.overlay is not None
    assert "plugin_dir = 'projects/configs/petrv2/'" in launch.overlay.text


def test_a_mapping_over_a_null_replaces_it(tmp_path: Path) -> None:
    """mmcv refuses to merge a mapping into a null."""
    config = trees.mmdet3d_0(tmp_path / "tree")
    config.write_text(config.read_text() + "fp16 = None\noptimizer_config = dict(grad_clip=None)\n")
    launch = trees.plan(tmp_path / "tree", config, precision="fp16", clip=2.5)
    assert launch.overlay is not None
    assert launch.overlay.text.splitlines()[2:] == [
        "fp16 = dict(_delete_=True, loss_scale='dynamic')",
        "optimizer_config = dict(grad_clip=dict(_delete_=True, max_norm=2.5))",
    ]


def test_config_and_tree_belong_together(tmp_path: Path) -> None:
    trees.mit(tmp_path / "tree")
    config = trees.petr(tmp_path / "other")
    with pytest.raises(BevctlError, match="is mit-bevfusion, which takes those of torchpack"):
        trees.plan(tmp_path / "tree", config)


def test_an_option_that_the_script_does_not_have(tmp_path: Path) -> None:
    config = trees.mmdet3d_0(tmp_path / "tree")
    script = tmp_path / "tree" / "tools" / "train.py"
    script.write_text(script.read_text().replace("parser.add_argument('--work-dir')\n", ""))
    with pytest.raises(BevctlError, match="has no option --work-dir"):
        trees.plan(tmp_path / "tree", config)
