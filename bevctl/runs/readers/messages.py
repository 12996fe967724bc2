"""Messages that the loggers of mmcv 1.x and mmengine share, as events and facts of the run."""

from __future__ import annotations

import re

from bevctl.runs.readers.text import TextLog

_START = re.compile(r"Start running, host: (\S+?), work_dir: (.*)")
_LIMIT = re.compile(r"\bmax: (\d{1,12}) (epochs|iters)")
_RESUMED = re.compile(r"[Rr]esumed (?:from )?epoch:? (\d{1,9}), iter:? (\d{1,12})")
_RESUME_FROM = re.compile(r"Auto resumed from the latest checkpoint (\S+?)\.?$|[Rr]esum(?:e|ed|ing) from:? (\S+)")
_SAVING = re.compile(r"Saving checkpoint at (\d{1,12}) (epochs?|iterations?|iters?)")
_LOADED = re.compile(r"[Ll]oad(?:s|ed)? checkpoint from (?:\w+ path: )?(\S+)")
_DUMPS = (
    ("Environment info:", "env"),
    ("Config:", "config"),
    ("Model:", "text"),
    ("Hooks will be executed in the following order:", "text"),
    ("initialize ", "text"),
    ("Name of parameter - Initialization information", "text"),
)


def openmmlab_message(text: TextLog, level: str, body: str, number: int) -> None:
    """Takes a message of `level`; the collector's time is its time."""
    text.message(level, body, number)
    for title, name in _DUMPS:
        if body.startswith(title):
            if name == "env":
                text.out.begin("start", "A run starts", text.place.line(number))
            text.open_dump(name, body[len(title) :])
            return
    if not body.strip():
        text.open_dump("text")  # mmengine's environment, KITTI's tables
        return
    _progress(text, body, number)


def _progress(text: TextLog, body: str, number: int) -> None:
    out, where = text.out, text.place.line(number)
    if match := _SAVING.search(body):
        out.event(
            "checkpoint", body.strip(), where, **{"epochs" if match[2][0] == "e" else "iterations": int(match[1])}
        )
    elif match := _START.search(body):
        out.log.header |= {"host": match[1], "work_dir": match[2].strip()}
        out.begin("start", "A run starts", where, host=match[1], work_dir=match[2].strip())
    elif match := _RESUMED.search(body):
        out.begin("resume", body.strip(), where, epoch=int(match[1]), iteration=int(match[2]))
    elif match := _RESUME_FROM.search(body):
        out.begin("resume", body.strip(), where, checkpoint=match[1] or match[2])
    elif match := _LOADED.search(body):
        out.event("load", body.strip()[:300], where, checkpoint=match[1])
    elif match := _LIMIT.search(body):
        if match[2] == "epochs":
            out.log.max_epochs = int(match[1])
        else:
            out.log.max_iters = int(match[1])
    elif body.startswith("Exp name: "):
        out.log.header["name"] = body[10:].strip().removesuffix(".py")
    elif body.startswith("Distributed training: "):
        out.log.header.setdefault("env", {})["Distributed training"] = body[22:].strip()
