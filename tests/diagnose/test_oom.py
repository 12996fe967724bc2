"""`diagnose oom`: both wordings of PyTorch's sentence, what held the memory, and what to turn down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bevctl.config.load import load, to_dict, to_yaml
from bevctl.data.split import open_split
from bevctl.diagnose import oom, oom_samples
from bevctl.diagnose.memory_knobs import comparison
from bevctl.diagnose.memory_savings import Savings, predicted_savings
from bevctl.diagnose.report import Diagnosis, Remedy, Status
from bevctl.diagnose.setting import Setting
from bevctl.diagnose.shortage import Shortage
from bevctl.engine.dist import World
from bevctl.engine.parts import training_loader
from bevctl.measure import memory_inputs
from bevctl.measure.memory_trace import SampleSize
from bevctl.runs.records import EventRecord
from tests.conftest import Outcome
from tests.engine.disk import write_run_files
from tests.models.nano import nano_config
from tests.runs.logs import write

from .cases import CRASHING_FP16, ask, ask_log, evidence, found, header, mmcv_config, own_run, the, windows

OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {tried} GiB (GPU 1; 23.70 GiB total capacity; {allocated} GiB "
    "already allocated; 0.60 GiB free; {reserved} GiB reserved in total by PyTorch)"
)
NEW = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of "
    "23.65 GiB of which 300.00 MiB is free. Process 4242 has 23.30 GiB memory in use. Of the allocated memory 20.10 "
    "GiB is allocated by PyTorch, and 2.40 GiB is reserved by PyTorch but unallocated."
)
FP32 = mmcv_config(4, more="fp16 = None\n")
HALF = mmcv_config(4, more=CRASHING_FP16)


def old(tried: float = 1.1, allocated: float = 14.2, reserved: float = 21.9, frame: str = "forward") -> list[str]:
    """A traceback with the sentence of PyTorch 1."""
    message = OLD.format(tried=tried, allocated=allocated, reserved=reserved)
    return ["Traceback (most recent call last):", f'  File "models/lss.py", line 71, in {frame}', "    x()", message]


def _figures(answer: Diagnosis) -> dict[str, float]:
    """The first table: GiB by what they were."""
    return {row[0]: row[1] for row in answer.tables[0].rows}


@pytest.fixture(autouse=True)
def _no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing a model of full size takes half a minute; see `test_knobs_are_predicted_for_a_run_of_bevctl`."""
    monkeypatch.setattr(oom, "predicted_savings", lambda *_: Savings())


def test_fragmentation_in_the_old_wording(tmp_path: Path) -> None:
    answer = ask_log("oom", tmp_path, [*header(HALF, "0,1"), *windows(6, memory="14336"), *old()])
    assert found(answer) == {"MEM002": "fail", "MEM101": "warn"}
    assert "1.10 GiB were asked for, 0.60 of 23.7 were free" in the(answer, "MEM002").title
    told = the(answer, "MEM101")
    assert "7.7 GiB lay idle" in told.title
    assert "max_split_size_mb" in told.fix[0].why  # PyTorch 1.10 has no expandable segments
    assert "after iteration 300" in evidence(the(answer, "MEM002"))
    assert "models/lss.py" in evidence(the(answer, "MEM002"))
    assert _figures(answer)["reserved, in no tensor"] == pytest.approx(7.7)


def test_the_new_wording_before_the_first_record(tmp_path: Path) -> None:
    answer = ask_log("oom", tmp_path, [*header(FP32, "0,1"), *old()[:3], NEW])
    assert found(answer) == {"MEM002": "fail", "MEM101": "warn", "MEM103": "warn"}
    table = _figures(answer)
    assert (table["in tensors (allocated)"], table["reserved, in no tensor"]) == (20.1, 2.4)
    assert table["outside of PyTorch"] == pytest.approx(23.65 - 300 / 1024 - 22.5, abs=0.01)
    assert "at least 20.6 GiB" in the(answer, "MEM103").title


def test_a_full_card_that_is_not_fragmented_points_at_the_sample(tmp_path: Path) -> None:
    lines = [*header(HALF, "0"), *windows(6, memory="20480"), *old(1.1, 21.6, 21.9)]
    answer = ask_log("oom", tmp_path, lines)
    assert found(answer) == {"MEM002": "fail", "MEM104": "warn"}
    assert "300 iterations" in the(answer, "MEM104").title


def test_another_process_on_the_card(tmp_path: Path) -> None:
    answer = ask_log("oom", tmp_path, [*header(HALF, "0"), *windows(3), *old(1.1, 9.0, 9.5)])
    assert found(answer)["MEM102"] == "warn"
    assert "12.1 GiB" in the(answer, "MEM102").title  # 23.7 - 0.6 - 9.5 - 1.5


def test_the_evaluation_is_named(tmp_path: Path) -> None:
    lines = [*header(HALF, "0"), *windows(8), *old(1.1, 21.6, 21.9, "single_gpu_test")]
    assert found(ask_log("oom", tmp_path, lines)) == {"MEM002": "fail", "MEM105": "warn"}


def _whys(fix: tuple[Remedy, ...]) -> list[str]:
    return [remedy.why for remedy in fix]


def test_knobs_come_in_order_with_what_they_save(tmp_path: Path) -> None:
    precision, checkpointing, batch = _whys(
        the(ask_log("oom", tmp_path, [*header(FP32, "0"), *windows(4), *old(1.1, 20.9, 21.9)]), "MEM002").fix
    )
    assert precision == "half precision: saves about 5.2 of 22.0 GiB"
    assert "recomputed" in checkpointing
    assert batch == "2 instead of 4 samples a GPU, 2 steps added up: at least 11.0 GiB instead of 22.0"


def test_knobs_that_are_turned_already_are_not_offered(tmp_path: Path) -> None:
    config = mmcv_config(1, more=CRASHING_FP16).replace(
        "model = dict(", "model = dict(img_backbone=dict(with_cp=True),"
    )
    fix = the(ask_log("oom", tmp_path, [*header(config, "0"), *windows(4), *old(1.1, 20.9, 21.9)]), "MEM002").fix
    assert len(fix) == 1
    assert "the batch is 1 already" in fix[0].why


def test_batch_1_and_batch_norm_are_warned_of(tmp_path: Path) -> None:
    config = mmcv_config(2, more=CRASHING_FP16)
    fix = the(ask_log("oom", tmp_path, [*header(config, "0"), *windows(4), *old(1.1, 20.9, 21.9)]), "MEM002").fix
    assert "BatchNorm then sees one sample" in fix[-1].why


def test_two_batches_tell_what_one_sample_takes(tmp_path: Path) -> None:
    small = write(
        tmp_path / "small.log", [*header(mmcv_config(2, more=CRASHING_FP16), "0"), *windows(4, memory="6144")]
    )
    lines = [*header(HALF, "0"), *windows(4, memory="10240"), *old(1.0, 9.0, 21.9)]
    answer = ask_log("oom", tmp_path / "big", lines, against=small)
    # 6 GiB at 2 and 10 at 4: 2 fixed, 2 a sample
    assert "About 4.0 GiB" in the(answer, "MEM106").title


def test_a_run_of_bevctl_gets_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = Savings(0.5, 0.25, 0.6, {"fp16, batch 4": 18.0})
    monkeypatch.setattr(oom, "predicted_savings", lambda *_: predicted)
    run = own_run(tmp_path, {"loss": [2.0] * 60, "memory_gib": [18.0] * 60}, 60)
    end = {"kind": "end", "message": f"GPU memory ran out in iteration 61: {NEW}", "time": 1.79e9 + 99}
    write(run / "events.jsonl", [json.dumps({**end, "data": {"status": "failed"}})])
    answer = ask("oom", run)
    assert found(answer) == {"MEM002": "fail", "MEM101": "warn"}
    settings = [remedy.set for remedy in the(answer, "MEM002").fix]
    assert {"train.batch": 2, "train.accumulate": 2} in settings
    assert {"model.checkpointing": ["camera"]} in settings
    whys = " ".join(remedy.why for remedy in the(answer, "MEM002").fix)
    assert "about 15.5 of 20.6 GiB" in whys  # three quarters of 20.10 GiB and 512 MiB more
    assert "12.4 GiB instead of 20.6" in whys
    assert answer.tables[1].name == "predicted"
    allocator, pools, *_ = (remedy.why for remedy in the(answer, "MEM101").fix)
    assert "which a run of bevctl has by itself unless that variable was set" in allocator
    assert pools.startswith("train.cuda_graphs=false")
    assert the(answer, "MEM106").title.startswith("About")


def test_the_samples_of_the_step_are_those_that_it_read(tmp_path: Path) -> None:
    config = load(write_run_files(tmp_path)).config
    run = own_run(tmp_path / "run", {"loss": [2.0] * 6}, 6)
    (run / "config.yaml").write_text(to_yaml(config))
    segment = {"precision": "fp32", "batch": 2, "world": 1, "accumulate": 1, "iters_per_epoch": 4}
    document = {"schema": "bevctl.run/1", "status": "failed", "segments": [segment], "iters_per_epoch": 4}
    (run / "run.json").write_text(json.dumps(document))
    end = {"kind": "end", "message": f"GPU memory ran out in iteration 7: {NEW}", "time": 1.79e9 + 99}
    write(run / "events.jsonl", [json.dumps({**end, "data": {"status": "failed"}})])
    shown = evidence(the(ask("oom", run), "MEM002"))
    assert "samples of iteration 7: 2 samples, the largest with " in shown
    assert "of 8 looked at, the median is " in shown
    told = oom_samples._indices(config, {**segment, "world": 2, "accumulate": 2, "iters_per_epoch": 1}, 3, 8)
    read = [
        index
        for rank in (0, 1)
        for indices in training_loader(config, open_split(config, "train"), World(rank, 2), 2, 0, False).batch_sampler
        for index in indices
    ]
    assert told == read
    assert len(set(told)) == 8
    (tmp_path / config.data.info_train).unlink()
    assert "samples of iteration" not in evidence(the(ask("oom", run), "MEM002"))


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed. ", "LOAD002"),
        ("RuntimeError: DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that", "LOAD002"),
        ("Out of memory: Killed process 812 (python) total-vm:91234kB", "MEM003"),
        ("ERROR:torch.distributed.elastic:failed (exitcode: -9) local_rank: 1", "MEM003"),
    ],
)
def test_memory_of_the_host(tmp_path: Path, line: str, id: str) -> None:
    answer = ask_log("oom", tmp_path, [*header(HALF, "0"), *windows(4), line])
    assert found(answer) == {id: "fail"}
    assert "1 instead of 2 loading processes" in the(answer, id).fix[0].why


def test_the_error_code_of_spconv(tmp_path: Path) -> None:
    line = "RuntimeError: /tmp/build/cumm/tensorview.h(114) cuda execution failed with error 2"
    assert found(ask_log("oom", tmp_path, [*windows(4), line]))["MEM002"] == "fail"


def test_a_healthy_run_is_clear_only_where_it_is_known_to_have_gone_on(tmp_path: Path) -> None:
    whole = [*header(HALF, "0"), *(line.replace("/400]", "/400]") for line in windows(8))]
    answer = ask_log("oom", tmp_path, whole)
    assert found(answer) == {}
    assert (answer.status, [f.id for f in answer.findings]) == (Status.INCONCLUSIVE, ["MEM107"])
    run = own_run(tmp_path / "own", {"loss": [2.0] * 60, "memory_gib": [9.5] * 60}, 60)
    answer = ask("oom", run)
    assert (answer.status, list(answer.findings)) == (Status.CLEAR, [])
    assert "9.50 GiB" in answer.looked_at[-1]


def test_another_failure_is_no_want_of_memory(tmp_path: Path) -> None:
    answer = ask_log("oom", tmp_path, [*windows(4), "Traceback (most recent call last):", "KeyError: 'infos'"])
    assert (answer.status, found(answer)) == (Status.CLEAR, {})


def test_what_other_ranks_notice_does_not_rule_memory_out(tmp_path: Path) -> None:
    line = "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer"
    answer = ask_log("oom", tmp_path, [*windows(4), line])
    assert (answer.status, [f.id for f in answer.findings]) == (Status.INCONCLUSIVE, ["MEM107"])


@pytest.mark.parametrize(("reserved", "fragmented"), [(10.9, False), (11.2, True)])
def test_idle_memory_counts_where_it_would_have_been_enough(reserved: float, fragmented: bool) -> None:
    event = EventRecord("failure", "x", None)
    assert Shortage(event, tried=1.0, allocated=10.0, reserved=reserved).fragmented is fragmented


def test_the_command(invoke: Callable[..., Outcome], tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", [*header(HALF, "0"), *windows(4), *old()])
    result = invoke("diagnose", "oom", path, "--json")
    assert (result.code, result.document["status"]) == (1, "found")
    assert result.document["memory"][0] == {"what": "asked for", "GiB": 1.1}
    assert invoke("diagnose", "oom", path).code == 1


def test_knobs_are_predicted_for_a_run_of_bevctl(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = memory_inputs.sizes_of([SampleSize(points=2000, sites=(900, 1000, 500, 200, 150), boxes=3)], "made up")
    monkeypatch.setattr(memory_inputs, "sample_sizes", lambda *_, **__: sizes)
    config = nano_config(**{"model.camera": None, "train.cuda_graphs": False})
    savings = predicted_savings(to_dict(config), Setting(own=True, precision="fp32", batch=8))
    assert savings.half_batch is not None
    assert 0.5 < savings.half < 1.0
    assert 0.3 < savings.half_batch < 1.0
    assert savings.checkpointed == 1.0, "there is no camera to recompute"
    assert next(iter(savings.predicted_gib)) == "fp32, batch 8, as it was"
    table = comparison(savings)
    assert (table.name, len(table.rows)) == ("predicted", 4)
    assert comparison(Savings()).name == "measured"
