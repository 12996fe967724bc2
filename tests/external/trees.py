"""Checkouts of the five kinds in small: what each is told by, the options of its script, and a config or two."""

from __future__ import annotations

from pathlib import Path

from bevctl.config.foreign import read_foreign
from bevctl.external.interpreter import Interpreter
from bevctl.external.launch import Launch, plan_launch
from bevctl.external.trees import read_tree
from bevctl.external.wanted import Wanted

MMCV_OPTIONS = (
    "--work-dir", "--resume-from", "--seed", "--deterministic", "--cfg-options", "--launcher", "--local_rank",
)  # fmt: skip
MMENGINE_OPTIONS = ("--work-dir", "--amp", "--resume", "--cfg-options", "--launcher", "--local_rank", "--local-rank")
PCDET_OPTIONS = (
    "--cfg_file", "--batch_size", "--epochs", "--workers", "--extra_tag", "--ckpt", "--pretrained_model", "--launcher",
    "--local_rank", "--set", "--use_amp",
)  # fmt: skip
SWITCHES = ("--deterministic", "--amp", "--use_amp")


def script(imports: str, options: tuple[str, ...], rank: str = "os.environ['LOCAL_RANK']") -> str:
    """A training script that has imports and options, and cannot be run."""
    lines = [imports, "import argparse", "parser = argparse.ArgumentParser()"]
    for option in options:
        action = ", action='store_true'" if option in SWITCHES else ""
        lines.append(f"parser.add_argument('{option}'{action})")
    return "\n".join([*lines, rank, "raise AssertionError('nothing runs this')", ""])


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mit(root: Path, launcher: str = "from torchpack import distributed as dist") -> Path:
    write(root / "tools" / "train.py", script(launcher, ("--run-dir",)))
    write(root / "configs" / "default.yaml", "seed: 0\nfp16: {loss_scale: {growth_interval: 2000}}\nmax_epochs: 20\n")
    write(
        root / "configs" / "nuscenes" / "default.yaml",
        "data: {samples_per_gpu: 4, workers_per_gpu: 4}\noptimizer: {type: AdamW, lr: 2.0e-4}\n"
        "optimizer_config: {grad_clip: {max_norm: 35}}\nrunner: {max_epochs: '${max_epochs}'}\n",
    )
    text = "model: {encoders: {camera: null}, heads: {object: {type: TransFusionHead}}}\nmax_epochs: 6\n"
    return write(root / "configs" / "nuscenes" / "det" / "convfuser.yaml", text)


def mmdet3d_0(root: Path) -> Path:
    write(root / "tools" / "train.py", script("import os\nfrom mmcv import Config\nimport mmdet3d", MMCV_OPTIONS))
    base = "data = dict(samples_per_gpu=4, workers_per_gpu=4)\noptimizer = dict(type='AdamW', lr=1e-4)\n"
    base += "optimizer_config = dict(grad_clip=dict(max_norm=35, norm_type=2))\nlr_config = dict(policy='cyclic')\n"
    write(root / "configs" / "_base_" / "base.py", base + "runner = dict(type='EpochBasedRunner', max_epochs=20)\n")
    text = "_base_ = '../_base_/base.py'\nmodel = dict(type='CenterPoint', pts_bbox_head=dict(type='CenterHead'))\n"
    return write(root / "configs" / "centerpoint" / "centerpoint_4x8_nus.py", text)


def mmdet3d_1(root: Path, options: tuple[str, ...] = MMENGINE_OPTIONS) -> Path:
    write(root / "tools" / "train.py", script("import os\nfrom mmengine.config import Config", options))
    return write(
        root / "projects" / "BEVFusion" / "configs" / "bevfusion_voxel0075_8xb4-cyclic-20e_nus-3d.py",
        "lr = 0.0001\n"
        "model = dict(type='BEVFusion', bbox_head=dict(type='TransFusionHead'))\n"
        "train_dataloader = dict(batch_size=4, num_workers=4, persistent_workers=True)\n"
        "optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=lr), clip_grad=dict(max_norm=35))\n"
        "param_scheduler = [dict(type='CosineAnnealingLR', T_max=8, eta_min=lr * 10, begin=0, end=8),\n"
        "    dict(type='CosineAnnealingMomentum', T_max=8, eta_min=0.85 / 0.95, begin=0, end=8)]\n"
        "train_cfg = dict(by_epoch=True, max_epochs=20)\nauto_scale_lr = dict(enable=False, base_batch_size=32)\n",
    )


def petr(root: Path) -> Path:
    imports = "import os\nimport mmcv\nfrom projects.mmdet3d_plugin import build_distiller"
    write(root / "tools" / "train.py", script(imports, MMCV_OPTIONS))
    write(root / "projects" / "mmdet3d_plugin" / "__init__.py")
    return write(
        root / "projects" / "configs" / "petrv2" / "petrv2.py",
        "plugin = True\nplugin_dir = 'projects/mmdet3d_plugin/'\n"
        "model = dict(type='Petr3D', pts_bbox_head=dict(type='PETRv2Head'))\n"
        "data = dict(samples_per_gpu=1, workers_per_gpu=4)\noptimizer = dict(type='AdamW', lr=2e-4)\n"
        "optimizer_config = dict(type='Fp16OptimizerHook', loss_scale=512., grad_clip=dict(max_norm=35))\n"
        "total_epochs = 24\nrunner = dict(type='EpochBasedRunner', max_epochs=total_epochs)\n"
        "load_from = 'ckpts/vov.pth'\nresume_from = None\n",
    )


def openpcdet(root: Path, rank: str = "os.environ.get('LOCAL_RANK', '0')") -> Path:
    write(root / "tools" / "train.py", script("import os\nfrom pcdet.config import cfg", PCDET_OPTIONS, rank))
    write(root / "pcdet" / "__init__.py")
    write(root / "tools" / "cfgs" / "dataset_configs" / "nuscenes.yaml", "DATA_PATH: ../data/nuscenes\n")
    return write(
        root / "tools" / "cfgs" / "nuscenes_models" / "centerpoint.yaml",
        "CLASS_NAMES: [car]\nDATA_CONFIG: {_BASE_CONFIG_: cfgs/dataset_configs/nuscenes.yaml}\n"
        "MODEL: {NAME: CenterPoint, DENSE_HEAD: {NAME: CenterHead}}\n"
        "OPTIMIZATION: {BATCH_SIZE_PER_GPU: 4, NUM_EPOCHS: 20, LR: 0.001, GRAD_NORM_CLIP: 10}\n",
    )


KINDS = {
    "mit-bevfusion": mit,
    "mmdet3d-0.x": mmdet3d_0,
    "mmdet3d-1.x": mmdet3d_1,
    "petr": petr,
    "openpcdet": openpcdet,
}


def plan(root: Path, config: Path, torch: str | None = "1.12.1", launcher: str = "auto", **wanted: object) -> Launch:
    """The launch of a config in a tree, by an interpreter that is only a name."""
    interpreter = Interpreter(root.parent / "env" / "bin" / "python", torch)
    given = Wanted(**wanted)  # type: ignore[arg-type]
    return plan_launch(read_tree(root), read_foreign(config), given, interpreter, root.parent / "run", launcher)


def command(launch: Launch, resume: Path | None = None) -> list[str]:
    """The command line with what differs between machines replaced by names."""
    said = launch.command(resume, 29500)
    top = str(launch.tree.root.parent)
    return [word.replace(str(launch.tree.root), "TREE").replace(top, "") for word in said]
