"""A training script of mmdet3d 0.x's kind for mmcv-full 1.x: its options, hooks, logs and checkpoints; a small model.

The network has a convolution, one of mmcv's compiled operators (RoIAlign) and a linear layer, and trains on a CPU.
"""

import argparse
import os
import os.path as osp
import time

import mmcv
import torch
from mmcv import Config, DictAction
from mmcv.cnn import ConvModule
from mmcv.ops import RoIAlign
from mmcv.runner import (
    BaseModule,
    Fp16OptimizerHook,
    OptimizerHook,
    build_optimizer,
    build_runner,
    init_dist,
    set_random_seed,
)
from mmcv.utils import collect_env, get_logger
from torch.cuda.amp import autocast
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--work-dir")
    parser.add_argument("--resume-from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    parser.add_argument("--launcher", choices=["none", "pytorch"], default="none")
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(args.local_rank)
    return args


class Images(Dataset):
    def __init__(self, length, size):
        generator = torch.Generator().manual_seed(7)
        self.images = torch.rand(length, 3, size, size, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.images[index].mean()


class Detector(BaseModule):
    def __init__(self, channels, nan_from=None, pause=0.0):
        super().__init__()
        self.conv = ConvModule(3, channels, 3, padding=1, norm_cfg=dict(type="BN"))
        self.pool = RoIAlign(4, spatial_scale=1.0, sampling_ratio=2)
        self.head = torch.nn.Linear(channels * 16, 1)
        self.nan_from = nan_from
        self.pause = pause
        self.steps = 0

    def forward(self, images):
        with autocast(enabled=images.is_cuda):  # in half precision mmcv's own auto_fp16 needs a GPU
            features = self.conv(images)
        boxes = torch.tensor([[i, 2.0, 2.0, 12.0, 12.0] for i in range(len(images))])
        return self.head(self.pool(features.float(), boxes).flatten(1)).squeeze(1)

    def train_step(self, data, optimizer):
        images, target = data
        loss = (self(images) - target).pow(2).mean()
        self.steps += 1
        time.sleep(self.pause)
        if self.nan_from is not None and self.steps >= self.nan_from:
            loss = loss * float("nan")
        values = dict(loss_bbox=loss.item(), loss=loss.item())
        return dict(loss=loss, log_vars=values, num_samples=len(images))


class DistributedModel(torch.nn.parallel.DistributedDataParallel):
    def train_step(self, data, optimizer):
        return self.module.train_step(data, optimizer)


def optimizer_hook(cfg, distributed):
    """As mmdet's train_detector makes it."""
    fp16 = cfg.get("fp16", None)
    if fp16 is not None:
        return Fp16OptimizerHook(**cfg.optimizer_config, **fp16, distributed=distributed)
    if distributed and "type" not in cfg.optimizer_config:
        return OptimizerHook(**cfg.optimizer_config)
    return cfg.optimizer_config


def main():
    args = parse_args()
    cfg = Config.fromfile(args.config)
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    name = osp.splitext(osp.basename(args.config))[0]
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or osp.join("work_dirs", name)
    cfg.resume_from = args.resume_from or cfg.get("resume_from")
    distributed = args.launcher != "none"
    if distributed and torch.cuda.is_available():
        init_dist(args.launcher, **cfg.dist_params)
    elif distributed:  # mmcv's init_dist counts GPUs
        torch.distributed.init_process_group(**cfg.dist_params)

    mmcv.mkdir_or_exist(osp.abspath(cfg.work_dir))
    cfg.dump(osp.join(cfg.work_dir, osp.basename(args.config)))
    timestamp = time.strftime("%Y%m%d_%H%M%S", time.localtime())
    logger = get_logger("mmdet", log_file=osp.join(cfg.work_dir, timestamp + ".log"))
    dashes = "-" * 60 + "\n"
    information = "\n".join("{}: {}".format(key, value) for key, value in collect_env().items())
    logger.info("Environment info:\n" + dashes + information + "\n" + dashes)
    logger.info("Distributed training: {}".format(distributed))
    logger.info("Config:\n{}".format(cfg.pretty_text))
    set_random_seed(args.seed)

    dataset = Images(cfg.data.samples, cfg.data.size)
    sampler = DistributedSampler(dataset) if distributed else None
    loader = DataLoader(
        dataset,
        batch_size=cfg.data.samples_per_gpu,
        num_workers=cfg.data.workers_per_gpu,
        shuffle=sampler is None,
        sampler=sampler,
    )
    model = Detector(**{key: value for key, value in cfg.model.items() if key != "type"})
    if distributed:
        model = DistributedModel(model)
    runner = build_runner(
        cfg.runner,
        default_args=dict(
            model=model,
            optimizer=build_optimizer(model, cfg.optimizer),
            work_dir=cfg.work_dir,
            logger=logger,
            meta=dict(config=cfg.pretty_text, seed=args.seed, exp_name=osp.basename(args.config)),
        ),
    )
    runner.timestamp = timestamp
    runner.register_training_hooks(
        cfg.lr_config, optimizer_hook(cfg, distributed), cfg.checkpoint_config, cfg.log_config
    )
    if cfg.resume_from:
        runner.resume(cfg.resume_from, map_location="cpu")
    elif cfg.get("load_from"):
        runner.load_checkpoint(cfg.load_from, map_location="cpu")
    runner.run([loader], [("train", 1)])


if __name__ == "__main__":
    main()
