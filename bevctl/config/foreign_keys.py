"""Where configs of other projects keep what they have in common: one row a kind, for reading and for changing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bevctl.config.foreign import ForeignConfig
from bevctl.config.foreign_values import lookup


@dataclass(frozen=True)
class Keys:
    """Dotted keys of one kind of config; of several the first that is set decides. Empty: it has no such key."""

    batch: tuple[str, ...]
    """Samples a GPU."""
    workers: tuple[str, ...]
    """Loading processes a GPU."""
    epochs: tuple[str, ...]
    lr: tuple[str, ...]
    warmup: tuple[str, ...] = ()
    """Iterations."""
    clip: tuple[str, ...] = ()
    accumulate: tuple[str, ...] = ()
    data_root: tuple[str, ...] = ("data_root", "dataset_root")
    load_from: tuple[str, ...] = ("load_from",)


KEYS = {
    "torchpack": Keys(
        batch=("data.samples_per_gpu",),
        workers=("data.workers_per_gpu",),
        epochs=("runner.max_epochs", "max_epochs"),
        lr=("optimizer.lr",),
        warmup=("lr_config.warmup_iters",),
        clip=("optimizer_config.grad_clip.max_norm",),
        accumulate=("optimizer_config.cumulative_iters",),
    ),
    "mmcv": Keys(
        batch=("data.train_dataloader.samples_per_gpu", "data.imgs_per_gpu", "data.samples_per_gpu"),
        workers=("data.train_dataloader.workers_per_gpu", "data.workers_per_gpu"),
        epochs=("runner.max_epochs", "total_epochs"),
        lr=("optimizer.lr",),
        warmup=("lr_config.warmup_iters",),
        clip=("optimizer_config.grad_clip.max_norm",),
        accumulate=("optimizer_config.cumulative_iters",),
    ),
    "mmengine": Keys(
        batch=("train_dataloader.batch_size",),
        workers=("train_dataloader.num_workers",),
        epochs=("train_cfg.max_epochs",),
        lr=("optim_wrapper.optimizer.lr",),
        clip=("optim_wrapper.clip_grad.max_norm",),
        accumulate=("optim_wrapper.accumulative_counts",),
    ),
    "openpcdet": Keys(
        batch=("OPTIMIZATION.BATCH_SIZE_PER_GPU",),
        workers=(),
        epochs=("OPTIMIZATION.NUM_EPOCHS",),
        lr=("OPTIMIZATION.LR",),
        clip=("OPTIMIZATION.GRAD_NORM_CLIP",),
        data_root=("DATA_CONFIG.DATA_PATH",),
        load_from=(),
    ),
}


def numbers(config: ForeignConfig, keys: tuple[str, ...]) -> Iterator[int | float]:
    """The numbers that these keys hold, in their order."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def to_set(config: ForeignConfig, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys to write a value to, so that it decides: every one that the config has, else the last."""
    present = tuple(key for key in keys if lookup(config.values, key) is not None)
    return present or keys[-1:]
