"""`bevctl train` as a user meets it: options, messages, exit codes, real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.config.load import load
from bevctl.engine.checkpoint import read_checkpoint
from bevctl.errors import ExitCode
from bevctl.models.build import build_model
from bevctl.preflight.host import Limit
from bevctl.sizes import format_gib

from ..conftest import Outcome
from ..engine.disk import write_run_files

Invoke = Callable[..., Outcome]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose run takes a second or two."""
    return write_run_files(tmp_path_factory.mktemp("nano"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _events(work_dir: Path) -> list[str]:
    return [json.loads(line)["message"] for line in (work_dir / "events.jsonl").read_text().splitlines()]


def test_trains_and_continues_with_the_config_of_the_run(invoke: Invoke, nano: Path) -> None:
    first = invoke("train", nano, "--work-dir", "run", "--max-iters", "3", "--json")
    assert first.code == 0, first.err
    assert first.document["schema"] == "bevctl.train/1"
    assert (first.document["iter"], first.document["checkpoint"]) == (3, "run/iter_3.pth")
    second = invoke("train", "--work-dir", "run", "--resume", "auto")
    assert second.code == 0, second.err
    assert "using the config of the resumed run" in second.err
    assert "Same setting: continuing at iteration 3 (epoch 1, 3 of 4 done)" in second.err
    third = invoke("train", nano, "--work-dir", "straight")
    assert third.code == 0
    weights = [read_checkpoint(Path(name) / "latest").state_dict for name in ("run", "straight")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_second_stage_takes_two_files_in_turn_and_keeps_what_is_frozen(invoke: Invoke, nano: Path) -> None:
    assert invoke("train", nano, "--work-dir", "first", "--max-iters", "1").code == 0
    torch.manual_seed(5)
    head = {k: v for k, v in build_model(load(nano).config).state_dict().items() if k.startswith("heads.")}
    torch.save({"state_dict": head, "meta": {"format": "bevctl"}}, "head.pth")
    files = ("--load-from", "first/latest", "--load-from", "head.pth")
    frozen = ("--set", "model.freeze=[encoders.lidar, heads.object]")
    done = invoke("train", nano, *files, *frozen, "--work-dir", "second", "--max-iters", "3")
    assert done.code == 0, done.err
    assert done.err.index("Weights from first/latest") < done.err.index("Weights from head.pth")
    first, second = (read_checkpoint(Path(name) / "latest").state_dict for name in ("first", "second"))
    expected = {k: v for k, v in first.items() if k.startswith("encoders.lidar.")} | head
    assert all(torch.equal(second[name], value) for name, value in expected.items())
    assert not torch.equal(second["decoder.backbone.blocks.0.0.weight"], first["decoder.backbone.blocks.0.0.weight"])
    assert json.loads(Path("second/run.json").read_text())["segments"][0]["load_from"] == "first/latest, head.pth"
    on = invoke("train", "--work-dir", "second", "--resume", "auto")
    assert "Same setting: continuing at iteration 3" in on.err
    assert "Weights from" not in on.err
    assert invoke("train", nano, *files, *frozen, "--work-dir", "straight").code == 0
    ends = [read_checkpoint(Path(name) / "latest").state_dict for name in ("second", "straight")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_options_reach_the_config(invoke: Invoke, nano: Path) -> None:
    options = (
        "--bf16 --loss-scale 512 --batch 3 --accumulate 2 --workers 0 --lr 0.003 --warmup 7 --epochs 5 "
        "--grad-clip 1.5 --grad-checkpoint --seed 9 --deterministic --compile --device cpu -n --json"
    )
    in_iterations = ("--set", "train.schedule_iters=77")
    done = invoke("train", nano, *options.split(), *in_iterations, "--work-dir", "somewhere")
    assert done.code == 0, done.err
    config = done.document["config"]
    assert config["precision"]["dtype"] == "bf16"
    assert config["precision"]["loss_scale"] == 512
    train = config["train"]
    assert (train["batch"], train["accumulate"], train["epochs"], train["deterministic"]) == (3, 2, 5, True)
    assert train["compile"] is True
    assert (config["optim"]["lr"], config["optim"]["warmup"], config["optim"]["clip"]) == (0.003, 7, 1.5)
    assert (config["seed"], config["work_dir"]) == (9, "somewhere")
    assert config["model"]["checkpointing"] == ["camera", "lidar", "decoder"]
    assert (done.document["iters_per_epoch"], done.document["total_iters"]) == (1, 5)
    assert done.document["global_batch"] == 6
    assert not Path("somewhere").exists()


def test_the_dry_run_resolves_the_rate_and_uses_earlier_times(invoke: Invoke, nano: Path) -> None:
    rule = ("--lr-scaling", "sqrt", "--set", "optim.base_batch=8", "--set", "optim.base_lr=2e-5")
    planned = invoke("train", nano, "-n", "--batch", "4", "--accumulate", "2", *rule)
    assert "learning rate 2e-05: sqrt rule from 2e-05 at batch 8 to global batch 8" in planned.out
    assert "Finish: not known" in planned.out
    assert invoke("train", nano, "--work-dir", "run", "--max-iters", "2").code == 0
    timed = invoke("train", nano, "--work-dir", "run", "-n", "--json").document
    assert timed["iter_time_s"] > 0
    assert timed["duration_s"] == pytest.approx(timed["iter_time_s"] * 8)


def test_the_dry_run_says_what_the_gpu_will_show(invoke: Invoke, nano: Path) -> None:
    memory = invoke("train", nano, "-n", "--device", "auto", "--json").document["memory"]
    assert 0 < memory["allocated_bytes"] <= memory["reserved_bytes"] < memory["device_bytes"]
    assert (memory["card_bytes"] is None) != torch.cuda.is_available()
    told = invoke("train", nano, "-n", "--device", "auto").out
    assert f"{format_gib(memory['device_bytes'])} on the device, as nvidia-smi shows it (predicted)" in told
    on_cpu = invoke("train", nano, "-n", "--device", "cpu", "--json").document
    assert (on_cpu["memory"], on_cpu["state_bytes"] > 0) == (None, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fp16", "--fp32"], "contradict"),
        (["--lr", "1e-3", "--lr-scaling", "linear"], "contradict"),
        (["--resume", "auto", "--load-from", "x.pth"], "contradict"),
        (["--resume", "epoch_9.pth"], "no checkpoint epoch_9.pth"),
        (["--load-from", "x.pth"], "no checkpoint x.pth"),
        (["--loss-scale", "0"], "neither dynamic nor a number"),
        (["--batch", "0"], "train.batch"),
        (["--workers", "some"], "'some' is neither a whole number nor auto"),
        (["--bacth", "4"], "No such option"),
        (["--no-preflight", "--set", "data.root=/nowhere/at/all"], "/nowhere/at/all"),
        (["--set", "optim.lr_scaling=linear"], "base_batch"),
        (["--set", "precision.fp32_modules=[heads.objet]"], "heads.objet"),
        (["--nnodes", "2"], "--rdzv-endpoint"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_2(
    invoke: Invoke, nano: Path, arguments: list[str], message: str
) -> None:
    done = invoke("train", nano, "--device", "cpu", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def test_what_the_check_at_the_start_finds_ends_with_exit_1(invoke: Invoke, nano: Path) -> None:
    done = invoke("train", nano, "--device", "cpu", "--set", "data.root=/nowhere/at/all", "--json")
    assert done.code == 1
    assert "Preflight stopped the run: DATA001" in done.document["error"]["message"]
    assert "--no-preflight" in done.document["error"]["hint"]
    assert not Path("runs").exists()


def test_a_check_at_the_start_that_finds_nothing_is_one_line(
    invoke: Invoke, nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bevctl.preflight.system.cores", lambda: Limit(8, "this machine"))
    done = invoke("train", nano, "--device", "cpu", "--work-dir", "run", "--max-iters", "1")
    assert done.code == 0, done.err
    assert [line[:14] for line in done.err.splitlines() if "reflight" in line] == ["Preflight PASS"]
    silent = invoke("train", nano, "--device", "cpu", "--work-dir", "silent", "--max-iters", "1", "--no-preflight")
    assert silent.code == 0
    assert "Preflight" not in silent.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_zero_gpus_with_gpus_2(invoke: Invoke, nano: Path) -> None:
    stopped = invoke("train", nano, "--device", "auto", "--gpus", "2")
    assert stopped.code == 1
    assert "GPU001" in stopped.err
    done = invoke("train", nano, "--device", "auto", "--gpus", "2", "--no-preflight")
    assert done.code == 2
    assert "--gpus 2, but no usable GPUs here" in done.err


def test_a_port_in_use_is_told(invoke: Invoke, nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = invoke("train", nano, "--gpus", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
        assert done.code == 4
        assert f"port of 127.0.0.1:{port} is in use" in done.err
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        done = invoke("train", nano)
        assert done.code == 4
        assert f"port of 127.0.0.1:{port} is in use" in done.err


def test_an_incomplete_distributed_environment_is_told(
    invoke: Invoke, nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    done = invoke("train", nano)
    assert done.code == 2
    assert "incompletely" in done.err


def test_a_damaged_checkpoint_is_one_sentence(invoke: Invoke, nano: Path) -> None:
    assert invoke("train", nano, "--work-dir", "run", "--max-iters", "1").code == 0
    damaged = Path("damaged.pth")
    damaged.write_bytes(Path("run/iter_1.pth").read_bytes()[:5000])
    done = invoke("train", nano, "--work-dir", "run", "--resume", damaged, "--json")
    assert done.code == 2
    assert "truncated or damaged" in done.document["error"]["message"]


def test_truncated_point_clouds_are_named_and_end_the_run(invoke: Invoke, tmp_path: Path) -> None:
    config = write_run_files(tmp_path)
    for number in (2, 5):
        (tmp_path / f"{number}.bin").write_bytes(b"\0" * 7)
    tolerant = invoke("train", config, "--work-dir", "tolerant", "--max-iters", "4")
    assert tolerant.code == 0, tolerant.err
    assert "2.bin" in tolerant.err
    strict = invoke("train", config, "--work-dir", "strict", "--set", "data.max_bad_samples=1")
    assert strict.code == ExitCode.RUN_FAILED
    assert "more than data.max_bad_samples = 1" in strict.err
    assert "5.bin" in strict.err
    assert json.loads(Path("strict/run.json").read_text())["status"] == "failed"


def _start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bevctl", "train", *map(str, arguments)]
    environment = {**NO_GPU, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options)


def _wait_for_records(work_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    log = work_dir / "log.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_ranks_agree_stop_together_and_resume(nano: Path) -> None:
    """Two gloo processes: SIGTERM to the launcher checkpoints and gives 6; resumed, they end with equal weights."""
    endless = ("--set", "train.schedule_iters=100000")
    process = _start(nano, "--gpus", "2", "--work-dir", "run", "--batch", "1", "--workers", "1", *endless)
    _wait_for_records(Path("run"), 3, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED, errors
    stopped = read_checkpoint(Path("run/latest"))
    assert stopped.iteration is not None
    assert stopped.iteration >= 3
    assert len(stopped.content["rng"]) == 2
    assert not torch.equal(stopped.content["rng"][0]["torch"], stopped.content["rng"][1]["torch"])
    limit = str(stopped.iteration + 2)
    again = _start(
        nano, "--gpus", "2", "--resume", "auto", "--work-dir", "run", "--batch", "1", "--max-iters", limit, *endless
    )
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert any(line.startswith("Same setting") for line in _events(Path("run")))
    assert errors.count("Same setting") == 1, "only rank 0 speaks"
    assert json.loads(Path("run/run.json").read_text())["segments"][1]["world"] == 2


def test_a_failing_worker_keeps_its_exit_code_and_speaks_once(nano: Path) -> None:
    spoilt = ("--set", "optim.lr=1e30", "--set", "optim.clip=null", "--set", "train.schedule_iters=100000")
    process = _start(nano, "--gpus", "2", "--work-dir", "run", "--batch", "1", *spoilt)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == ExitCode.NONFINITE, errors
    assert errors.count("error: ") == 1
    assert "50 steps in a row" in errors
    assert "Traceback" not in errors


def test_a_second_signal_ends_at_once(nano: Path) -> None:
    process = _start(nano, "--work-dir", "run", "--set", "train.schedule_iters=100000")
    _wait_for_records(Path("run"), 1, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (ExitCode.INTERRUPTED, ExitCode.TERMINATED)


def test_detached_training_goes_on_in_the_background(nano: Path) -> None:
    starter = _start(nano, "--work-dir", "run", "--max-iters", "2", "--detach", "--json", stdout=subprocess.PIPE)
    out, errors = starter.communicate(timeout=60)
    assert starter.returncode == 0, errors
    document = json.loads(out)
    assert document["status"] == "started"
    assert os.getsid(document["pid"]) == document["pid"], "it has a session of its own"
    deadline = time.monotonic() + 60
    while not Path("run/iter_2.pth").exists():
        assert time.monotonic() < deadline, Path("run/console.log").read_text()
        time.sleep(0.1)
    assert Path(document["console_log"]).exists()


def test_batch_and_workers_are_found_where_auto_is_asked_for(invoke: Invoke, nano: Path) -> None:
    outcome = invoke("train", nano, "--work-dir", "run", "--max-iters", "1", "--batch", "auto", "--workers", "auto")
    assert outcome.code == 0, outcome.err
    assert "batch 2 as configured" in outcome.err
    assert "--workers auto: " in outcome.err
    dry = invoke("train", nano, "--batch", "auto", "-n")
    assert "train.batch: auto is found when training starts" in dry.err
    assert invoke("train", nano, "--batch", "many").code == 2
