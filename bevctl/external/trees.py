"""The kinds of project tree that are known, and how each is told from the files in it.

To add a kind: a row in TREES, and the way it is started in `bevctl.external.dialects`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bevctl.config.document import display
from bevctl.errors import BevctlError
from bevctl.external.script import Script, read_script

TRAIN_SCRIPT = Path("tools", "train.py")


@dataclass(frozen=True)
class TreeKind:
    """One kind of project."""

    name: str
    title: str
    config_kind: str
    """Kind of config (see `ForeignConfig.kind`) that its training script takes."""
    is_it: Callable[[Path, Script], bool]
    """Tells it by the tree's files and its training script; the first kind that says yes is it."""
    folder: str = ""
    """Folder of the tree that the script is run in."""
    fp16_by_hook: bool = False
    """mmcv: its own configs switch FP16 on with an optimizer hook, not with `fp16 = dict(…)`."""
    gpus: int = 8
    """GPUs that its recipes are made for: the learning rates of its configs belong to that many."""


TREES = (
    TreeKind(
        "openpcdet",
        "OpenPCDet",
        "openpcdet",
        lambda root, script: (root / "pcdet").is_dir() or "pcdet" in script.imports,
        folder="tools",
    ),
    TreeKind(
        "mit-bevfusion",
        "mit-bevfusion",
        "torchpack",
        lambda root, script: "torchpack" in script.imports or (root / "configs" / "default.yaml").is_file(),
    ),
    TreeKind("mmdet3d-1.x", "mmdet3d 1.1 or newer", "mmengine", lambda _, script: "mmengine" in script.imports),
    TreeKind(
        "petr",
        "PETR and other trees with projects/mmdet3d_plugin",
        "mmcv",
        lambda root, script: "mmcv" in script.imports and (root / "projects" / "mmdet3d_plugin").is_dir(),
        fp16_by_hook=True,
    ),
    TreeKind("mmdet3d-0.x", "mmdet3d 0.x and 1.0", "mmcv", lambda _, script: "mmcv" in script.imports),
)


@dataclass(frozen=True)
class Tree:
    """A checkout of a project."""

    root: Path
    """Absolute."""
    kind: TreeKind
    script: Script

    @property
    def cwd(self) -> Path:
        """Where its programs are run."""
        return self.root / self.kind.folder

    def inside(self, path: Path) -> str:
        """`path` as it is written in that folder: relative where it lies below it, else absolute."""
        path = path.absolute()
        return str(path.relative_to(self.cwd)) if path.is_relative_to(self.cwd) else str(path)


def read_tree(root: Path) -> Tree:
    """The tree in a folder.

    Raises:
        BevctlError: there is no tools/train.py, or it is of no known kind.
    """
    root = root.absolute()
    if not root.is_dir():
        raise BevctlError(f"{root} is no folder.", "Give --repo the checkout of the project.")
    path = root / TRAIN_SCRIPT
    if not path.is_file():
        raise BevctlError(f"There is no {TRAIN_SCRIPT} in {root}.", "Give --repo the checkout of the project.")
    script = read_script(path)
    kind = next((kind for kind in TREES if kind.is_it(root, script)), None)
    if kind is None:
        raise BevctlError(
            f"{display(path)} imports none of torchpack, mmcv, mmengine and pcdet.",
            f"Known are {', '.join(kind.title for kind in TREES)}.",
        )
    return Tree(root, kind, script)


def find_root(config: Path) -> Path:
    """The nearest folder above a config that has a training script.

    Raises:
        BevctlError: there is none.
    """
    for folder in config.absolute().parents:
        if (folder / TRAIN_SCRIPT).is_file():
            return folder
    raise BevctlError(
        f"No folder above {display(config)} has {TRAIN_SCRIPT}.", "Name the project's checkout with --repo."
    )
