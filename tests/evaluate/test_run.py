"""evaluate_model: the loop around a model, what it leaves out, and several ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing, nn

from bevctl.batch import Batch, Predictions
from bevctl.config.schema import Config, MapHeadConfig
from bevctl.data.index import InfoFile, SampleInfo
from bevctl.engine.dist import World
from bevctl.engine.signals import Interrupted, StopRequest
from bevctl.errors import BevctlError, ExitCode
from bevctl.evaluate import run as evaluate_run
from bevctl.evaluate.run import Evaluation, evaluate_model
from tests.evaluate import scenes
from tests.models.nano import nano_calibration, with_value

MAP_SIZE = 8
CONFIG: Config = with_value(with_value(Config(), "model.map", None), "data.max_bad_samples", 1)
MAP_CONFIG: Config = with_value(CONFIG, "model.map", MapHeadConfig())


class Oracle(nn.Module):
    """A model that says what it was given for each sample, and notes how it was called."""

    def __init__(self, keyframes: tuple[SampleInfo, ...], with_map: bool = False) -> None:
        super().__init__()
        self.objects = {sample.token: scenes.perfect(sample) for sample in keyframes}
        self.with_map = with_map
        self.frozen = nn.BatchNorm1d(2)
        self.seen: list[tuple[bool, bool, bool]] = []

    def predict(self, batch: Batch) -> Predictions:
        self.seen.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        objects = [self.objects[token] for token in batch.tokens]
        return Predictions(
            boxes=[torch.from_numpy(seen.boxes) for seen in objects],
            scores=[torch.from_numpy(seen.scores) for seen in objects],
            labels=[torch.from_numpy(seen.labels) for seen in objects],
            bev_map=true_map(batch.size) * 0.9 if self.with_map else None,
        )


def true_map(batch: int) -> torch.Tensor:
    """Six classes, each a band of its own."""
    grid = torch.zeros(batch, 6, MAP_SIZE, MAP_SIZE)
    for k in range(6):
        grid[:, k, k : k + 2] = 1
    return grid


def batch_of(keyframes: tuple[SampleInfo, ...], problems: tuple[str, ...] = (), bev_map: bool = False) -> Batch:
    size = len(keyframes)
    return Batch(
        images=None,
        points=None,
        calibration=nano_calibration(size),
        boxes=[torch.zeros(0, 9)] * size,
        labels=[torch.zeros(0, dtype=torch.int64)] * size,
        bev_map=true_map(size) if bev_map else None,
        has_boxes=torch.ones(size, dtype=torch.bool),
        has_map=torch.full((size,), bev_map),
        tokens=[sample.token for sample in keyframes],
        problems=list(problems),
    )


def evaluate(
    model: nn.Module, batches: list[Batch], infos: InfoFile, config: Config = CONFIG, **options: object
) -> Evaluation:
    return evaluate_model(
        model,
        batches,
        infos,
        config,
        autocast=contextlib.nullcontext,
        **options,  # type: ignore[arg-type]
    )


def test_a_perfect_model_gets_a_document_without_surprises() -> None:
    keyframes = scenes.samples(attributes=True)
    result = evaluate(
        Oracle(keyframes), [batch_of(keyframes[:2]), batch_of(keyframes[2:])], scenes.info_file(keyframes)
    )
    assert result.metrics() == pytest.approx({"mAP": 1.0, "NDS": 1.0, "recall_2m": 1.0}, abs=1e-3)
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert document["map"] is None
    assert document["samples"] == 3
    assert document["skipped"] == 0
    assert document["detection"]["recall_2m"] == 1.0
    assert document["detection"]["per_class"]["bus"]["AP_0.5"] == pytest.approx(1.0)
    assert any("bike-rack filter is skipped" in note for note in document["notes"])


def test_tables_below_the_data_root_are_used(tmp_path: Path) -> None:
    scenes.write_tables(tmp_path)
    keyframes = scenes.samples()
    config = with_value(CONFIG, "data.root", str(tmp_path))
    result = evaluate(Oracle(keyframes), [batch_of(keyframes)], scenes.info_file(keyframes), config)
    assert result.document()["detection"]["ground_truth"] == "tables"
    assert result.notes == ()


def test_the_model_is_left_as_it_was() -> None:
    keyframes = scenes.samples(1)
    model = Oracle(keyframes).train()
    model.frozen.eval()

    def autocast() -> contextlib.AbstractContextManager[None]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    evaluate_model(model, [batch_of(keyframes)], scenes.info_file(keyframes), CONFIG, autocast=autocast)
    assert model.seen == [(False, False, True)]
    assert model.training
    assert not model.frozen.training


def test_flags_come_back_after_an_error() -> None:
    keyframes = scenes.samples(1)
    model = Oracle(()).train()
    with pytest.raises(KeyError):
        evaluate(model, [batch_of(keyframes)], scenes.info_file(keyframes))
    assert model.training


def test_unread_samples_leave_the_ground_truth_too() -> None:
    keyframes = scenes.samples(attributes=True)
    batches = [batch_of(keyframes[:2]), batch_of((), problems=("Sample sample2: x.bin cannot be read.",))]
    result = evaluate(Oracle(keyframes), batches, scenes.info_file(keyframes))
    assert result.metrics()["mAP"] == pytest.approx(1.0)
    assert (result.samples, result.skipped) == (2, 1)
    assert "left out: Sample sample2: x.bin cannot be read." in result.notes


def test_too_many_unread_samples_fail_the_run() -> None:
    keyframes = scenes.samples()
    batches = [batch_of(keyframes[:1], problems=("first.", "second."))]
    with pytest.raises(BevctlError, match=r"2 samples could not be read.*max_bad_samples=1.*first") as raised:
        evaluate(Oracle(keyframes), batches, scenes.info_file(keyframes))
    assert raised.value.code == ExitCode.RUN_FAILED


def test_no_sample_at_all_fails_the_run() -> None:
    keyframes = scenes.samples(1)
    with pytest.raises(BevctlError, match="None of the 1 samples"):
        evaluate(Oracle(keyframes), [batch_of((), problems=("gone.",))], scenes.info_file(keyframes))


def test_a_set_without_annotations_has_predictions_only() -> None:
    annotated = scenes.samples(2)
    bare = tuple(scenes.without_boxes(sample) for sample in annotated)
    result = evaluate(Oracle(annotated), [batch_of(bare)], scenes.info_file(bare))
    assert result.detection is None
    assert result.metrics() == {}
    assert set(result.results) == {"sample0", "sample1"}
    mixed = (annotated[0], bare[1])
    result = evaluate(Oracle(annotated), [batch_of(mixed)], scenes.info_file(mixed))
    assert result.metrics()["mAP"] == pytest.approx(1.0)
    assert any("1 samples without annotated boxes" in note for note in result.notes)


def test_map_iou_and_kept_maps() -> None:
    keyframes = scenes.samples(2)
    batches = [batch_of(keyframes, bev_map=True)]
    model = Oracle(keyframes, with_map=True)
    result = evaluate(model, batches, scenes.info_file(keyframes), MAP_CONFIG, keep_maps={"sample1"})
    assert result.metrics()["mIoU"] == 1.0
    assert set(result.document()["map"]["per_class"]) == set(MAP_CONFIG.data.map_classes)
    assert result.results["sample0"].bev_map is None
    kept = result.results["sample1"].true_map
    assert kept is not None
    np.testing.assert_array_equal(kept, true_map(1)[0])


def test_without_any_true_map_iou_is_null_and_said() -> None:
    keyframes = scenes.samples(1)
    model = Oracle(keyframes, with_map=True)
    result = evaluate(model, [batch_of(keyframes)], scenes.info_file(keyframes), MAP_CONFIG)
    assert result.document()["map"] is None
    assert any("map IoU is not scored" in note for note in result.notes)


def test_progress_is_told_of_each_sample() -> None:
    keyframes = scenes.samples()
    told: list[int] = []

    class Recorder:
        def advance(self, n: int = 1) -> None:
            told.append(n)

    batches = [batch_of(keyframes[:2]), batch_of(()), batch_of(keyframes[2:])]
    evaluate(Oracle(keyframes), batches, scenes.info_file(keyframes), progress=Recorder())
    assert told == [2, 1]


class _Rank(NamedTuple):
    """What a rank tells."""

    rank: int
    metrics: dict[str, float]
    samples: int
    stopped: list[bool]


def _rank_main(rank: int, rendezvous: str, queue: multiprocessing.SimpleQueue) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    keyframes = scenes.samples()
    batches = [batch_of(keyframes[rank::2], bev_map=rank == 0)]
    model = Oracle(keyframes, with_map=True)
    result = evaluate(model, batches, scenes.info_file(keyframes), MAP_CONFIG, ranks=World(rank, 2))
    stopped = [_stopped(rank, *where) for where in ((1, Oracle, "predict"), (0, evaluate_run, "_score"))]
    queue.put(_Rank(rank, result.metrics(), result.samples, stopped))
    distributed.destroy_process_group()


def _stopped(rank: int, signalled: int, owner: object, name: str) -> bool:
    """Whether an evaluation is left when rank `signalled` alone gets a signal where it calls `name` of `owner`."""
    keyframes = scenes.samples()
    batches = [batch_of(keyframes[rank::2])]
    with pytest.MonkeyPatch.context() as patch, StopRequest() as stop:
        if rank == signalled:
            patch.setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        try:
            evaluate(
                Oracle(keyframes),
                batches,
                scenes.info_file(keyframes),
                ranks=World(rank, 2),
                interruptible=stop.interruptible,
            )
        except Interrupted:
            return True
    return False


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[_Rank]:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    workers = [context.Process(target=_rank_main, args=(rank, str(meeting), queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    return [queue.get() for _ in workers]


def test_two_ranks_give_the_numbers_of_one(two_ranks: list[_Rank]) -> None:
    keyframes = scenes.samples()
    batches = [batch_of(keyframes[0::2], bev_map=True), batch_of(keyframes[1::2])]
    alone = evaluate(Oracle(keyframes, with_map=True), batches, scenes.info_file(keyframes), MAP_CONFIG)
    assert {told.rank for told in two_ranks} == {0, 1}
    for told in two_ranks:
        assert told.metrics == alone.metrics()
        assert told.samples == 3


def test_a_signal_to_one_rank_stops_both_in_its_own_share_and_in_the_scoring(two_ranks: list[_Rank]) -> None:
    assert [told.stopped for told in two_ranks] == [[True, True]] * 2
