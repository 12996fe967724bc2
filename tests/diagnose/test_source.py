"""What is found in source code, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.diagnose.source import HIDES, IN_FP16, KEPT_FP32, OVERFLOWS, VANISHES, scan_source


def _kinds(folder: Path, code: str) -> list[tuple[int, str]]:
    path = folder / "head.py"
    path.write_text(code)
    return [(passage.line, passage.kind) for passage in scan_source(path)]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("x = torch.nan_to_num(x)", HIDES),
        ("x.nan_to_num_(0.0)", HIDES),
        ("loss = torch.nanmean(parts)", HIDES),
        ("x[torch.isnan(x)] = 0", HIDES),
        ("x[~torch.isfinite(x)] = 0", HIDES),
        ("x[x != x] = 0", HIDES),
        ("x = torch.where(torch.isnan(x), y, x)", HIDES),
        ("x = x.masked_fill(x.isinf(), 0)", HIDES),
        ("for batch in loader:\n    if torch.isnan(loss): continue", HIDES),
        ("if not torch.isfinite(loss):\n    loss = loss * 0", HIDES),
        ("y = torch.log(1 - p + 1e-12)", VANISHES),
        ("y = x / (n + 1e-8)", VANISHES),
        ("y = x.clamp(min=1e-9)", VANISHES),
        ("y = F.normalize(x, eps=1e-12)", VANISHES),
        ("def inverse_sigmoid(x, eps=1e-5): ...", OVERFLOWS),
        ("@force_fp32(apply_to=('x',))\ndef loss(self, x): ...", KEPT_FP32),
        ("@auto_fp16()\ndef forward(self, x): ...", IN_FP16),
        ("with torch.cuda.amp.autocast(enabled=False):\n    pass", KEPT_FP32),
        ("with torch.autocast('cuda', enabled=False):\n    pass", KEPT_FP32),
        ("with torch.autocast('cuda'):\n    pass", IN_FP16),
    ],
)
def test_passages(tmp_path: Path, code: str, kind: str) -> None:
    assert [found for _, found in _kinds(tmp_path, code)] == [kind]


@pytest.mark.parametrize(
    "code",
    [
        "y = torch.log(x + 1e-5)",
        "lr = 1e-9",
        "y = x / 2",
        "assert not torch.isnan(x).any()",
        "if torch.isnan(loss):\n    raise FloatingPointError",
        "velocity[mask] = 0",
        "def inverse_sigmoid(x, eps=1e-3): ...",
        "x = x[torch.isfinite(x)]",
    ],
)
def test_harmless_code(tmp_path: Path, code: str) -> None:
    assert _kinds(tmp_path, code) == []


def test_files_that_do_not_parse_and_code_that_is_not_trained_are_left_out(tmp_path: Path) -> None:
    for name, text in (("a.py", "nan_to_num(x"), ("test_b.py", "nan_to_num(x)"), ("c.py", "\n\nnan_to_num(x)")):
        (tmp_path / name).write_text(text)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "d.py").write_text("x[torch.isnan(x)] = 0")
    (tmp_path / "e.py").write_bytes(b"\xff\x00nan_to_num(x)")
    assert [(passage.path.name, passage.line) for passage in scan_source(tmp_path)] == [("c.py", 3)]
