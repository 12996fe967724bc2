"""What all tests share: a clean environment, the program in process, and data that lies beside the checkout."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bevctl.cli.main import run
from bevctl.console import Console

# Read when a kernel is defined: without a GPU, Triton's kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

# Other work on the machine must not fail a property test.
settings.register_profile("bevctl", deadline=None)
settings.load_profile("bevctl")


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout, read strictly."""
        document: dict[str, Any] = json.loads(self.out, parse_constant=_refuse)
        return document


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option or colour setting leaks in from the shell that runs the tests."""
    for name in os.environ:
        if name.startswith("BEVCTL_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Nano models have nothing to share out: on a busy machine threads that wait for each other cost seconds."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def full_float32() -> Iterator[None]:
    """No TF32 in convolutions, so that FP32 on a GPU can be compared with the CPU."""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def invoke() -> Callable[..., Outcome]:
    """Runs `bevctl <arguments>` in this process."""

    def call(*arguments: str | Path) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        code = run([str(argument) for argument in arguments], Console(out, err))
        return Outcome(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recorded numbers, logs and real data beside the checkout."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no recorded data at {folder}")
    return folder


@pytest.fixture(scope="session")
def synth_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small synthetic set with info files: six training and three held-out samples; read only."""
    from bevctl.data.prepare import prepare
    from bevctl.data.synth.dataset import make_dataset
    from bevctl.data.synth.options import SynthOptions

    root = tmp_path_factory.mktemp("synth")
    options = SynthOptions(train_scenes=2, val_scenes=1, keyframes=3, image_scale=0.1, processes=1)
    make_dataset(root, options)
    prepare(root, options.version, prefix="synth")
    return root
