"""The order of classes that a checkpoint's heads were trained with: their outputs are numbered by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bevctl.errors import BevctlError

if TYPE_CHECKING:
    from bevctl.config.schema import Config
    from bevctl.engine.checkpoint import Checkpoint

_HEADS = {"classes": "heads.object.", "map_classes": "heads.map."}
"""Key of the config's data section → how our names of the head that tells these classes apart begin."""
_WHOLE_MODELS = ("bevctl", "mit", "mmdet3d", "petr")
"""Layouts of which heads are loaded, and not an image backbone alone."""


def classes_of(meta: Mapping[str, Any], key: str = "classes") -> tuple[str, ...]:
    """The classes that bevctl, mmcv or mmengine has put into a checkpoint's meta; empty where none has.

    `key` is classes, or map_classes, which only bevctl's own files name.
    """
    config, dataset = meta.get("config"), meta.get("dataset_meta")
    data = config.get("data") if isinstance(config, Mapping) else None
    candidates = [data.get(key) if isinstance(data, Mapping) else None]
    if key == "classes":
        candidates += [meta.get("CLASSES"), dataset.get("classes") if isinstance(dataset, Mapping) else None]
    named = (tuple(c) for c in candidates if isinstance(c, list | tuple) and all(isinstance(n, str) for n in c))
    return next(named, ())


def other_order(theirs: tuple[str, ...], ours: tuple[str, ...]) -> bool:
    """Whether the two are the same classes in different orders."""
    return theirs != ours and sorted(theirs) == sorted(ours)


def check_class_order(checkpoint: Checkpoint, config: Config) -> None:
    """Raises BevctlError where a head of the checkpoint numbers the config's classes in another order.

    Shapes fit then, and every object would get another's name.
    """
    if config.model.mmdet3d is not None:  # its own code names the classes
        return
    for key, head in _HEADS.items():
        theirs, ours = classes_of(checkpoint.meta, key), tuple(getattr(config.data, key))
        if other_order(theirs, ours) and _has(checkpoint, head):
            raise BevctlError(
                f"The head in {checkpoint.path} was trained with data.{key} in another order: {', '.join(theirs)}.",
                f"Outputs are numbered by it. Set data.{key}=[{', '.join(theirs)}].",
            )


def _has(checkpoint: Checkpoint, head: str) -> bool:
    from bevctl.models.layouts import our_name, recognise, unwrapped  # imports torch, which preflight's start need not

    names = [unwrapped(name) for name in checkpoint.state_dict]
    layout = recognise(names)
    return layout in _WHOLE_MODELS and any(our_name(name, layout).startswith(head) for name in names)
