from __future__ import annotations

from mmengine.registry import Registry

MODELS, DATASETS = Registry(), Registry()
