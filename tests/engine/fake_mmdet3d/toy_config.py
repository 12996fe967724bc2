"""A config as mmdet3d's are, for the toy detector."""

default_scope = "mmdet3d"
custom_imports = {"imports": ["toy"]}
model = {"type": "ToyDetector", "width": 8}
data_root = "data/toy"
dataset = {"type": "ToyNuScenesDataset", "data_root": data_root, "ann_file": "toy_infos_train.pkl"}
train_dataloader = {"batch_size": 2, "num_workers": 0, "dataset": dataset}
val_dataloader = {"batch_size": 1, "num_workers": 0, "dataset": {**dataset, "ann_file": "toy_infos_val.pkl"}}
train_cfg = {"by_epoch": True, "max_epochs": 4, "val_interval": 5}
optim_wrapper = {
    "type": "OptimWrapper",
    "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.01},
    "clip_grad": {"max_norm": 35, "norm_type": 2},
    "paramwise_cfg": {"custom_keys": {"backbone": {"lr_mult": 0.1}}},
}
param_scheduler = [
    {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "begin": 0, "end": 5},
    {"type": "CosineAnnealingLR", "T_max": 4, "eta_min": 1e-5, "by_epoch": True, "convert_to_iter_based": True},
]
default_hooks = {"logger": {"type": "LoggerHook", "interval": 4}}
