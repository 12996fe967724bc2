_base_ = ["_base_/runtime.py"]
model = dict(type="Detector", channels=8)
data = dict(samples=64, size=16, samples_per_gpu=4, workers_per_gpu=0)
optimizer = dict(type="AdamW", lr=1e-3, weight_decay=0.01)
optimizer_config = dict(type="Fp16OptimizerHook", loss_scale="dynamic", grad_clip=dict(max_norm=35, norm_type=2))
lr_config = dict(policy="CosineAnnealing", warmup="linear", warmup_iters=4, min_lr_ratio=1e-3)
runner = dict(type="EpochBasedRunner", max_epochs=3)
