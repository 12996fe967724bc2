"""Inputs that are broken in every way, through the command line: the right id, exit code 1, nothing executed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.errors import ExitCode
from tests.conftest import Outcome
from tests.engine.bad_checkpoints import broken_bytes, mmcv, names_code, save, weights

Invoke = Callable[..., Outcome]
Make = Callable[[Path, Path], Path]
"""(folder, file that must not appear) → path of the bad input."""


def text(name: str, content: str | bytes) -> Make:
    def make(folder: Path, mark: Path) -> Path:
        path = folder / name
        data = content if isinstance(content, bytes) else content.replace("MARK", str(mark)).encode()
        path.write_bytes(data)
        return path

    return make


def _folder(name: str) -> Make:
    def make(folder: Path, _: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    return make


def _dangling(name: str) -> Make:
    def make(folder: Path, _: Path) -> Path:
        (folder / name).symlink_to(folder / "gone")
        return folder / name

    return make


def _loop(name: str) -> Make:
    def make(folder: Path, _: Path) -> Path:
        (folder / name).symlink_to(folder / name)
        return folder / name

    return make


def _absent(name: str) -> Make:
    return lambda folder, _: folder / name


CONFIGS: dict[str, Make] = {
    "absent": _absent("x.yaml"),
    "a folder": _folder("x.yaml"),
    "a dangling link": _dangling("x.yaml"),
    "a link loop": _loop("x.yaml"),
    "empty": text("x.yaml", ""),
    "binary": text("x.yaml", bytes(range(256))),
    "cut off": text("x.yaml", "train:\n  batch: [1, 2\n"),
    "a list": text("x.yaml", "- 1\n- 2\n"),
    "an unknown key": text("x.yaml", "train: {batchh: 4}\n"),
    "a wrong type": text("x.yaml", "train: {batch: four}\n"),
    "a section as a value": text("x.yaml", "train: 4\n"),
    "an alias of itself": text("x.yaml", "train: &a\n  batch: *a\n"),
    "a base of itself": text("x.yaml", "base: ./x.yaml\n"),
    "a yaml tag that runs code": text("x.yaml", "train: {batch: !!python/object/apply:os.system ['touch MARK']}\n"),
    "very large": text("x.yaml", "#" * 300_000),
    "nested very deeply": text("x.yaml", "train: " + "[" * 1500),
    "torchpack, an alias of itself": text("x.yaml", "optimizer: &a {lr: *a}\n"),
    "torchpack, a tag that runs code": text("x.yaml", "optimizer: !!python/object/apply:os.system ['touch MARK']\n"),
    "python, absent": _absent("x.py"),
    "python, a folder": _folder("x.py"),
    "python, not closed": text("x.py", "model = dict(\n"),
    "python, a script": text("x.py", "import os\nos.system('touch MARK')\n"),
    "python, its own base": text("x.py", "_base_ = './x.py'\nmodel = dict()\n"),
    "python, a base that is not there": text("x.py", "_base_ = './y.py'\nmodel = dict()\n"),
    "python, binary": text("x.py", b"\xff\x00\xfe"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path: Path, invoke: Invoke, name: str) -> None:
    mark = tmp_path / "mark"
    path = CONFIGS[name](tmp_path, mark)
    outcome = invoke(
        "preflight", path, "--device", "cpu", "--only", "files,data,launch", "--skip", "LAUNCH002", "--json"
    )
    assert outcome.code == ExitCode.FINDINGS
    failing = {check["id"]: check for check in outcome.document["checks"] if check["status"] == "fail"}
    assert set(failing) == {"FILE001"}
    assert failing["FILE001"]["found"]
    assert failing["FILE001"]["fix"]
    assert "Traceback" not in outcome.err
    assert not mark.exists()


def _checkpoint(name: str) -> Make:
    return lambda folder, _: Path(_written(folder / "x.pth", broken_bytes()[name]))


def _written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def _with_nan(folder: Path, _: Path) -> Path:
    entries = weights()
    entries["fuser.1.running_mean"][0] = math.nan
    return save(mmcv(state_dict=entries), folder / "x.pth")


CHECKPOINTS: dict[str, tuple[str, Make]] = {
    **{name: ("FILE003", _checkpoint(name)) for name in broken_bytes()},
    "absent": ("FILE003", _absent("x.pth")),
    "a folder": ("FILE003", _folder("x.pth")),
    "a dangling link": ("FILE003", _dangling("x.pth")),
    "a link loop": ("FILE003", _loop("x.pth")),
    "a pickle that would run code": ("FILE004", lambda folder, mark: names_code(folder / "x.pth", mark)),
    "the same in the old format": ("FILE004", lambda folder, mark: names_code(folder / "x.pth", mark, legacy=True)),
    "NaN in one tensor": ("FILE005", _with_nan),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(tmp_path: Path, invoke: Invoke, name: str) -> None:
    mark = tmp_path / "mark"
    id, make = CHECKPOINTS[name]
    path = make(tmp_path, mark)
    only = "FILE001,FILE003,FILE004,FILE005,FILE007,FILE008,LAUNCH006"
    outcome = invoke("preflight", "tiny", "--device", "cpu", "--resume", path, "--only", only, "--json")
    assert outcome.code == ExitCode.FINDINGS
    assert [check["id"] for check in outcome.document["checks"] if check["status"] == "fail"] == [id]
    verified = invoke("checkpoint", "verify", path, "--json")
    assert verified.code == ExitCode.FINDINGS
    assert [f["id"] for f in verified.document["findings"] if f["severity"] == "fail"] == [id]
    assert "Traceback" not in outcome.err + verified.err
    assert not mark.exists()


@pytest.mark.parametrize("option", ["--resume", "CONFIG"])
def test_permission_denied(tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    path = (
        save(mmcv(), tmp_path / "x.pth") if option == "--resume" else text("x.yaml", "train: {}\n")(tmp_path, tmp_path)
    )
    real = Path.open

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    words = ["tiny", "--resume", path] if option == "--resume" else [path]
    outcome = invoke("preflight", *words, "--device", "cpu", "--only", "FILE001,FILE003,FILE004", "--json")
    assert outcome.code == ExitCode.FINDINGS
    (failing,) = [check for check in outcome.document["checks"] if check["status"] == "fail"]
    assert failing["id"] == ("FILE003" if option == "--resume" else "FILE001")
    assert "Permission denied" in failing["found"]


def test_a_pipe_is_not_waited_for(tmp_path: Path, invoke: Invoke) -> None:
    pipe = tmp_path / "x.pth"
    os.mkfifo(pipe)
    outcome = invoke("preflight", "tiny", "--device", "cpu", "--resume", pipe, "--only", "FILE003", "--json")
    assert outcome.code == ExitCode.FINDINGS
    assert "no regular file" in str(outcome.document["checks"])
