"""Known reasons for numbers that are not finite, and what gives each away without running anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bevctl.diagnose.onset import Onset
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.diagnose.source import HIDES, IN_FP16, KEPT_FP32, OVERFLOWS, SMALLEST_FP16, VANISHES, Passage
from bevctl.diagnose.subject import Subject
from bevctl.finding import Evidence, Severity
from bevctl.preflight.half_weights import HalfCall

UNTOLD, HARMLESS = 0.7, 0.5
"""Factors on the confidence where the number format is not known, and where nothing has gone wrong yet."""
_MOST = 6
_GEOMETRY = re.compile(r"view_?trans|vtransform|lss|lift|depth", re.IGNORECASE)
"""Files whose sums over depth and coordinates need FP32."""


@dataclass(frozen=True)
class Clues:
    """What the signatures look at."""

    subject: Subject
    onset: Onset | None
    passages: Sequence[Passage] = ()
    half_calls: Sequence[HalfCall] = ()
    in_trouble: bool = False
    """The log or a checkpoint shows numbers that are not finite and should be."""

    def losses_match(self, pattern: str) -> bool:
        """Whether some losses, and only such ones, went non-finite while others did not."""
        onset = self.onset
        return onset is not None and onset.of_one_family and all(re.search(pattern, name) for name in onset.losses)


@dataclass(frozen=True)
class Signature:
    """A known reason."""

    title: str
    confidence: float
    """When its signs are seen in a run that is in trouble."""
    cause: str
    signs: Callable[[Clues], Iterator[Evidence]]
    """The signs that are seen; none: it is not this."""
    remedies: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Sentence → settings of bevctl's config, the best first."""
    only_in_trouble: bool = True
    """Says nothing of a run in which all is finite."""
    of_half: bool = True
    """Is a reason in FP16 only."""


def _static_scale(clues: Clues) -> Iterator[Evidence]:
    scale = clues.subject.setting.loss_scale
    view = clues.subject.view
    if not isinstance(scale, int | float):
        return
    yield Evidence(clues.subject.setting.where or "config", f"loss scale fixed at {scale:g}")
    if view is not None and len(bad := view.history.nonfinite("grad_norm")):
        yield Evidence("grad_norm", f"not finite in {int(bad.sum())} of {len(bad)} records ({bad.mean():.0%})")


def _heatmap(clues: Clues) -> Iterator[Evidence]:
    onset = clues.onset
    if onset is not None and clues.losses_match("heatmap"):
        total = len(onset.losses) + len(onset.finite)
        yield Evidence("losses", f"{len(onset.losses)} of {total} not finite: {_some(onset.losses)}; all others are")


def _auxiliary(clues: Clues) -> Iterator[Evidence]:
    onset = clues.onset
    if onset is not None and clues.losses_match(r"enc_|2d|aux|centerness|depth|dn_"):
        yield Evidence("losses", f"not finite: {_some(onset.losses)}; finite: {_some(onset.finite)}")


def _gpus_differ(clues: Clues) -> Iterator[Evidence]:
    setting = clues.subject.setting
    planned = setting.config.get("num_gpus") if setting.config is not None else None
    if isinstance(planned, int) and setting.gpus is not None and planned != setting.gpus:
        yield Evidence(setting.where, f"num_gpus = {planned}, from which the number of iterations is computed")
        yield Evidence("environment", f"the run has {setting.gpus} GPUs")


def _flash_attention(clues: Clues) -> Iterator[Evidence]:
    config = clues.subject.setting.config
    kinds = [str(kind) for kind in config.find("type", "model")] if config is not None else []
    flash = sorted({kind for kind in kinds if "flash" in kind.lower()})
    if flash:
        yield Evidence(clues.subject.setting.where, f"the model uses {', '.join(flash)}")


def _small_eps(clues: Clues) -> Iterator[Evidence]:
    config = clues.subject.setting.config
    for value in config.find("eps", "model") if config is not None else ():
        if isinstance(value, float) and 0 < value <= SMALLEST_FP16 / 2:
            yield Evidence(clues.subject.setting.where, f"eps = {value:g} is 0 in FP16 (least positive: 6e-8)")


def _bare_neck(clues: Clues) -> Iterator[Evidence]:
    config = clues.subject.setting.config
    neck = config.get("model.img_neck") if config is not None else None
    if isinstance(neck, Mapping) and neck.get("type") == "FPN" and not neck.get("norm_cfg"):
        yield Evidence(clues.subject.setting.where, "model.img_neck is an FPN without norm_cfg")


def _hiding(clues: Clues) -> Iterator[Evidence]:
    return _of_kind(clues, HIDES)


def _vanishing(clues: Clues) -> Iterator[Evidence]:
    return _of_kind(clues, VANISHES)


def _overflowing(clues: Clues) -> Iterator[Evidence]:
    return _of_kind(clues, OVERFLOWS)


def _unprotected(clues: Clues) -> Iterator[Evidence]:
    in_half = [passage for passage in clues.passages if passage.kind == IN_FP16]
    protected = {passage.path for passage in clues.passages if passage.kind == KEPT_FP32}
    if in_half and not protected:
        yield Evidence("source", "no force_fp32 and no autocast(enabled=False) anywhere: losses run in FP16")
    for passage in in_half:
        if passage.path not in protected and _GEOMETRY.search(passage.path.name):
            yield Evidence(str(passage), f"the view transform runs in FP16 as a whole: {passage.text}")


def _half_weights(clues: Clues) -> Iterator[Evidence]:
    for call in clues.half_calls[:_MOST]:
        yield Evidence(f"{call.path}:{call.line}", call.text)


def _of_kind(clues: Clues, kind: str) -> Iterator[Evidence]:
    passages = [passage for passage in clues.passages if passage.kind == kind]
    for passage in passages[:_MOST]:
        yield Evidence(str(passage), passage.text)
    if len(passages) > _MOST:
        yield Evidence("source", f"and {len(passages) - _MOST} more places")


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_BF16 = {"precision.dtype": "bf16"}
_FP32_HEAD: tuple[str, Mapping[str, Any]] = (
    "the loss and the heads in FP32 (force_fp32 or autocast(enabled=False) there)",
    {},
)
SIGNATURES: dict[str, Signature] = {
    "NAN101": Signature(
        "The loss scale is fixed, so that an overflow repeats",
        0.75,
        "A fixed scale cannot go down after an overflow: each step whose scaled gradients leave FP16 is lost, over and "
        "over, until the gradients themselves shrink.",
        _static_scale,
        (
            ("a dynamic loss scale (loss_scale='dynamic')", {"precision.loss_scale": "dynamic"}),
            ("a lower fixed scale", {"precision.loss_scale": 128.0}),
        ),
        only_in_trouble=False,
    ),
    "NAN102": Signature(
        "Only the heatmap loss is not finite: its logarithm runs in FP16",
        0.8,
        "A focal loss on a heatmap takes log(1 - p); p rounds to 1 in FP16 from 0.9998 on, and a guard such as 1e-12 "
        "is 0 there, so that the logarithm is -inf.",
        _heatmap,
        (
            ("the detection head and its loss in FP32", {"precision.fp32_modules": ["heads.object"]}),
            ("p limited to 1 - 1e-3 before the logarithm; BF16 is no help, it has fewer bits near 1", {}),
        ),
    ),
    "NAN103": Signature(
        "Only an auxiliary head is not finite",
        0.4,
        "The main losses are finite, so that shared features still are: the auxiliary head itself, its targets or its "
        "weight are at fault, or its learning rate schedule is (see the length of the run).",
        _auxiliary,
        (_FP32_HEAD, ("switch the auxiliary loss off for a try, to see whether the rest stays finite", {})),
        of_half=False,
    ),
    "NAN104": Signature(
        "The length of the run was computed for another number of GPUs",
        0.5,
        "Schedules counted in iterations then are too short or too long: the learning rate decays at the wrong time.",
        _gpus_differ,
        (("num_gpus and batch_size in the config as they really are", {}),),
        only_in_trouble=False,
        of_half=False,
    ),
    "NAN105": Signature(
        "Flash attention is in use",
        0.45,
        "It runs in FP16 (or BF16) only: logits above 65504 are infinite, and a row that is masked as a whole is NaN.",
        _flash_attention,
        (
            ("the ordinary attention in FP32 for a try", {}),
            ("BF16 throughout", _BF16),
        ),
        of_half=False,
    ),
    "NAN106": Signature(
        "A guard against division by zero is 0 in FP16",
        0.55,
        "Numbers below 3e-8 round to 0 in FP16: the division or logarithm that they guard is not guarded.",
        _small_eps,
        (("eps of 1e-5 or more (1e-3 in BatchNorm, as sparse convolutions use)", {}),),
        only_in_trouble=False,
    ),
    "NAN107": Signature(
        "The image neck has no normalization",
        0.3,
        "Sums of unnormalized levels grow without a limit, in FP16 up to infinity.",
        _bare_neck,
        (("norm_cfg for the FPN", {}),),
        of_half=False,
    ),
    "NAN108": Signature(
        "The code hides NaN",
        0.6,
        "What replaces NaN in the forward pass keeps the loss finite, while the backward pass through the same place "
        "stays NaN; or a whole step is dropped silently.",
        _hiding,
        (
            ("take the replacement out for a few iterations: the first NaN then shows itself", {}),
            ("the part before it in FP32", {}),
        ),
        only_in_trouble=False,
        of_half=False,
    ),
    "NAN109": Signature(
        "Constants in the code are 0 in FP16",
        0.45,
        "Numbers below 3e-8 round to 0 in FP16: the division or logarithm that they guard is not guarded. Harmless "
        "where the code runs in FP32.",
        _vanishing,
        (("1e-5 instead, or that function in FP32", {}),),
        only_in_trouble=False,
    ),
    "NAN112": Signature(
        "inverse_sigmoid leaves FP16's range",
        0.6,
        "It divides by max(1 - x, eps); with an eps of 1e-5 the quotient, and in backward its square, exceed 65504.",
        _overflowing,
        (("coordinates and reference points in FP32, or an eps of 1e-3", {}),),
        only_in_trouble=False,
    ),
    "NAN113": Signature(
        "Parts that need FP32 are not kept in it",
        0.4,
        "Losses, view transform and box decoding overflow in FP16 in most projects, which therefore keep them in FP32.",
        _unprotected,
        (_FP32_HEAD,),
    ),
    "NAN114": Signature(
        "The weights themselves are FP16",
        0.7,
        "model.half() leaves no FP32 copy: updates below 1/2048 of a weight are lost, and Adam's eps of 1e-8 is 0.",
        _half_weights,
        (("mixed precision (autocast with FP32 weights) instead of half()", {}),),
        only_in_trouble=False,
        of_half=False,
    ),
}
"""What each id means; `bevctl explain ID` says how it is decided."""


def suspects(clues: Clues) -> Iterator[DiagnoseFinding]:
    """Every signature whose signs are seen; information only where nothing is wrong."""
    for id, signature in SIGNATURES.items():
        if _applies(signature, clues) and (evidence := tuple(signature.signs(clues))):
            yield _finding(id, signature, clues, evidence)


def _applies(signature: Signature, clues: Clues) -> bool:
    may_be_half = clues.subject.setting.precision in ("fp16", None)
    return (clues.in_trouble or not signature.only_in_trouble) and (may_be_half or not signature.of_half)


def _finding(id: str, signature: Signature, clues: Clues, evidence: tuple[Evidence, ...]) -> DiagnoseFinding:
    setting, confidence = clues.subject.setting, signature.confidence
    if signature.of_half and setting.precision is None:
        evidence = (*evidence, Evidence("precision", "not told by log or config; this is a reason in FP16 only"))
        confidence *= UNTOLD
    severity = Severity.WARN if clues.in_trouble else Severity.INFO
    confidence *= 1.0 if clues.in_trouble else HARMLESS
    usable = [remedy for remedy in signature.remedies if setting.may_use_bf16 or remedy[1] != _BF16]
    fix = tuple(Remedy(dict(settings) if setting.own else {}, why) for why, settings in usable)
    return DiagnoseFinding(id, severity, round(confidence, 2), signature.title, evidence, signature.cause, fix)
