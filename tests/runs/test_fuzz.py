"""No file, however broken, makes a reader raise or go on for ever."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bevctl.console import strict_json
from bevctl.runs.readers import READERS
from bevctl.runs.source import open_source
from tests.runs.logs import mmcv_lines, mmcv_message

LIMIT_S = 5.0
"""Far more than any of these files of some kilobytes takes."""

PIECES = [
    *mmcv_lines(3),
    mmcv_message(5, "Epoch(val) [1][81]\tobject/map: 0.4100, object/nds: nan"),
    mmcv_message(6, "Config:"),
    mmcv_message(6, "resumed epoch 1, iter 400"),
    "fp16 = dict(loss_scale='dynamic')",
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "RuntimeError: CUDA out of memory. Tried to allocate 1.10 GiB (GPU 0; 23.70 GiB total capacity)",
    "During handling of the above exception, another exception occurred:",
    '{"mode": "train", "epoch": 1, "iter": 50, "lr": 0.1, "loss": NaN, "time": 0.5, "memory": 4000}',
    '{"mode": "val", "epoch": 1, "iter": 81, "mAP": 0.25}',
    '{"lr": 0.1, "loss": Infinity, "time": 0.5, "epoch": 1, "iter": 50, "step": 50}',
    '{"epoch": 1, "iter": 1, "time": 1.7e9, "loss": null, "loss_nonfinite": "nan", "iter_time_s": 0.5}',
    '{"kind": "resume", "message": "Resumed", "time": 1.7e9, "data": {"metrics": {}}}',
    '{"epoch": 1e400, "iter": [], "step": {}, "mode": "train", "loss": "x", "kind": 3}',
    "02/03 04:05:06 - mmengine - INFO - Epoch(train) [1][  50/400]  lr: 2.0e-05  eta: 1 day, 0:00:01  loss: 2.5000",
    "2026-02-03 04:05:06,789   INFO  Train:    1/2 ( 50%) [   0/44 (  0%)]  Loss: 2.743 (2.74)  LR: 3.000e-04  "
    "Time cost: 00:00/00:33 [00:00/56:37]  Acc_iter 1           Data time: 0.13(0.13)  Forward time: 0.64(0.64)  "
    "Batch time: 0.77(0.77)",
    "Epoch 1:  45%|####5     | 450/1000 [01:23<01:40,  5.45it/s, loss=0.25]",
    "[Epoch 10] Loss: 0.125 - mAP: 0.415 - NDS: 0.508",
    f"{mmcv_message(7, 'Epoch [')}{'9' * 5000}][50/400]\tlr: 2.0, loss: 3.0000",
    '{"mode": "train", "epoch": 1, "iter": ' + "9" * 400 + ', "loss": 1.0, "step": ' + "9" * 400 + "}",
    "size mismatch for a.b: copying a param with shape torch.Size([1]) from checkpoint",
    "unexpected key in source state_dict: a.b.c, d.e.f",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0",
    "\x1b[32m2026-02-03\x1b[0m \x00\r\r",
]


def _read_quickly(path: Path) -> None:
    started = time.process_time()
    log = open_source(path).read()
    strict_json(log.header)
    strict_json([event.data for event in log.events])
    assert all(step.time is None or 0 <= step.time < 1e12 for step in log.steps)
    assert all(0 <= step.iter < 2**53 for step in log.steps)
    strict_json({name: metric.mean for name, metric in log.metrics.items()})
    windowed = open_source(path).read(since=1.7e9, until=1.8e9)
    assert windowed.records <= max(log.records, 1)
    assert time.process_time() - started < LIMIT_S


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=3000))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.log"
    path.write_bytes(data)
    _read_quickly(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=60)), max_size=20),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), max_size=4),
    end=st.sampled_from(["\n", "\r\n", "\r", ""]),
)
def test_pieces_of_logs_in_any_order_with_bytes_between(
    tmp_path: Path, pieces: list[str], cuts: list[tuple[float, bytes]], end: str
) -> None:
    data = "".join(piece + end for piece in pieces).encode("utf-8", "surrogatepass")
    for share, insert in cuts:
        place = int(share * len(data))
        data = data[:place] + insert + data[place + len(insert) // 2 :]
    path = tmp_path / "any.log"
    path.write_bytes(data)
    _read_quickly(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), other=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_truncated_and_spliced_real_logs(tmp_path: Path, shared: Path, share: float, other: float, seed: int) -> None:
    logs = sorted((shared / "logs").glob("*.*"))
    first, second = logs[seed % len(logs)].read_bytes(), logs[seed // 7 % len(logs)].read_bytes()
    start, place = int(share * len(first)), int(other * len(second))
    path = tmp_path / "any.log"
    path.write_bytes(first[max(0, start - 20_000) : start] + second[place : place + 20_000])
    _read_quickly(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.floats(0, 1), flip=st.floats(0, 1), mask=st.integers(0, 255))
@example(keep=0.375, flip=0.37109375, mask=28)  # epoch 0
def test_damaged_gzip(tmp_path: Path, keep: float, flip: float, mask: int) -> None:
    data = bytearray(gzip.compress("\n".join(mmcv_lines(60)).encode(), mtime=0))
    data = data[: int(keep * len(data))]
    if data:
        data[int(flip * (len(data) - 1))] ^= mask
    path = tmp_path / "any.log.gz"
    path.write_bytes(bytes(data))
    _read_quickly(path)


@pytest.mark.parametrize("line", ["a" * 300_000, "a:" * 150_000, "a: 1," * 60_000, "[" * 200_000, "1 " * 150_000])
@pytest.mark.parametrize("prefix", ["", *[piece[:60] for piece in PIECES[:5]], PIECES[15][:70], PIECES[17]])
def test_endless_lines_take_no_endless_time(tmp_path: Path, prefix: str, line: str) -> None:
    path = tmp_path / "any.log"
    path.write_text(f"{PIECES[0]}\n{prefix}{line}\n{prefix}{line}", encoding="utf-8")
    _read_quickly(path)


@pytest.mark.parametrize("name", sorted(READERS))
def test_every_reader_takes_the_lines_of_all_others(name: str) -> None:
    from bevctl.runs.collect import Collector
    from bevctl.runs.readers.clock import Clock
    from bevctl.runs.readers.text import Place
    from bevctl.runs.records import RunLog
    from bevctl.runs.window import Window

    log = RunLog(Path("any"), [Path("any")], name)
    out = Collector(log, Window())
    parser = READERS[name].parser(out, Clock(None), Place("any"))
    for _ in range(2):
        parser.feed([*PIECES, *reversed(PIECES), *(piece[: len(piece) // 2] for piece in PIECES)], 1)
        for piece in PIECES:
            parser.feed_torn(piece, 9)
            parser.feed_torn(piece[:-3], 9)
        parser.jump(Place("other", 100))
    parser.finish()
    out.finish(1.8e9)
    assert log.records == len(log.steps)
    assert [step.iter for step in log.steps] == sorted({step.iter for step in log.steps})
