"""The check of what data.previous needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bevctl.config.schema import PreviousFrameConfig
from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, warned
from bevctl.preflight.data_infos import LOW_SHARE, SAMPLES, readable_infos, spread
from bevctl.preflight.plan import Plan, of_plan

if TYPE_CHECKING:
    from bevctl.data.info import SampleInfo
    from bevctl.data.previous import PreviousFrames

_UNPACK = "Unpack what is missing (`bevctl data check` counts it)"
_TAKE_KEYFRAMES = ", or take keyframes: data.previous.source=keyframes"
_REBUILD = "Rebuild the info files with `bevctl data prepare`, or set data.previous to what they hold."


@of_plan
def earlier_images(context: Context, plan: Plan) -> Outcome:
    """DATA010: samples have images of an earlier moment; their files open, their poses fit, their time has passed."""
    from bevctl.data.previous import PreviousFrames

    config = context.config
    if config is None or config.data.previous is None:
        return skipped("the model sees one moment")
    infos = readable_infos(context)
    if not infos:
        return skipped("no info file can be read, see DATA002")
    told, short = [], []
    for split, info in infos.items():
        frames = PreviousFrames(info, config.data.previous, train=False)
        followers = [sample for sample in info.samples if len(frames.moments(sample))]
        if not followers:
            return failed(f"{split}: no sample has images of an earlier moment", _REBUILD)
        seen_by = [_looking_back(frames, sample) for sample in spread(followers, SAMPLES)]
        unpack = f"{_UNPACK}{_TAKE_KEYFRAMES if frames.reads_sweeps else ''}."
        for judge, fix in ((_unreadable, unpack), (_misplaced, _REBUILD)):
            problems = judge(plan.data_root, seen_by)
            if problems:
                return failed(f"{split}: {'; '.join(problems[:3])}", fix)
        longest = max(len(frames.moments(sample)) for sample in followers)
        told.append(f"{split}: {len(followers):,} of {len(info.samples):,} samples, up to {longest} moments each")
        short += [f"{split}: {text}" for text in _shortcomings(frames, config.data.previous, longest)]
    said = "; ".join(told)
    return warned(f"{said}; {'; '.join(short)}", _REBUILD) if short else passed(said)


def _looking_back(frames: PreviousFrames, sample: SampleInfo) -> SampleInfo:
    """The sample with the images that evaluation takes in place of its own, and its boxes where they were then."""
    images = frames.images(sample, tuple(sample.cameras), np.random.default_rng(0))
    if sample.boxes is None or not images:
        return dataclasses.replace(sample, cameras=images)
    age = sample.timestamp - float(np.mean([image.timestamp for image in images.values()]))
    boxes = sample.boxes.copy()
    boxes[:, :2] -= age * np.nan_to_num(boxes[:, 7:9])
    return dataclasses.replace(sample, cameras=images, boxes=boxes)


def _unreadable(root: Path, samples: Sequence[SampleInfo]) -> list[str]:
    """A sentence for each image that does not open."""
    from bevctl.preflight.data_samples import open_files

    opened = (open_files(root, sample, cameras=True, points=False, width=0) for sample in samples)
    return [problem for _, problems in opened for problem in problems]


def _misplaced(root: Path, samples: Sequence[SampleInfo]) -> list[str]:
    """What is wrong with the poses and times of samples whose cameras are those of an earlier moment."""
    from bevctl.preflight.data_samples import bad_matrices, boxes_in_images

    problems = [problem for sample in samples for problem in bad_matrices(sample)]
    problems += [
        f"the earlier image of {name} of sample {sample.token} is not earlier"
        for sample in samples
        for name, image in sample.cameras.items()
        if image.timestamp >= sample.timestamp
    ]
    seen, total = boxes_in_images(root, samples)
    if total and seen / total < LOW_SHARE:
        problems.append(f"{seen} of {total} boxes land in an earlier image ({seen / total:.0%})")
    return problems


def _shortcomings(frames: PreviousFrames, config: PreviousFrameConfig, longest: int) -> Iterator[str]:
    if frames.stands_in:
        yield "keyframes stand in for camera sweeps, which the file does not hold"
    elif config.train[1] >= longest or config.eval >= longest:
        yield f"data.previous goes back to place {max(config.train[1], config.eval)}, the last one is {longest - 1}"
