checkpoint_config = dict(interval=1)
log_config = dict(interval=2, hooks=[dict(type="TextLoggerHook")])
dist_params = dict(backend="gloo")
load_from = None
resume_from = None
