"""How a run ends: what its Trainer returns or raises, as a status, a message and an exit code."""

from __future__ import annotations

import time

import torch

from bevctl.engine.journal import RunJournal
from bevctl.engine.trainer import Trainer
from bevctl.errors import BevctlError, ExitCode
from bevctl.runs.records import Doing

_STATUS = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted", ExitCode.NONFINITE: "nonfinite"}


def fit(trainer: Trainer, journal: RunJournal) -> ExitCode:
    """Trains, and leaves in run.json and events.jsonl how it ended, whatever happens.

    Raises:
        BevctlError: GPU memory ran out, or a loading process ended (exit code 4); and as `Trainer.fit`.
    """
    status, message = "failed", "The run failed"
    try:
        code = trainer.fit()
        trainer.heartbeat.turn_to(Doing.SAVES, trainer.iteration)
        journal.finish_saving()
        status = _STATUS[code]
        asked_by = trainer.stop.name or "a signal to another rank"
        message = f"Stopped by {asked_by}" if code == ExitCode.PREEMPTED else _conclusion(trainer)
        return code
    except torch.cuda.OutOfMemoryError as error:
        told = f"GPU memory ran out in iteration {trainer.iteration + 1}"
        message = f"{told}: {str(error).partition(' If reserved but')[0]}"
        raise BevctlError(
            f"{told}.", "Lower --batch, or use --fp16 or --grad-checkpoint.", ExitCode.RUN_FAILED
        ) from error
    except BevctlError as error:
        status, message = _STATUS.get(error.code, "failed"), error.message
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if "DataLoader worker" in message:
            raise _worker_died(error) from error
        raise
    finally:
        journal.close_bar()
        journal.abandon_saving()
        note_end(journal, f"{message} (iteration {trainer.iteration})", status, trainer.iteration)


def note_end(journal: RunJournal, message: str, status: str, iteration: int) -> None:
    """Leaves in run.json and events.jsonl how a run ended."""
    if journal.writer is not None:
        journal.event("end", message, status=status)
        journal.writer.update(status=status, ended=time.time(), iter=iteration)


def _conclusion(trainer: Trainer) -> str:
    """How a run that came to its end is called."""
    nothing = trainer.futility.conclusion()
    return f"Finished, but {nothing}" if nothing else "Finished"


def _worker_died(error: Exception) -> BevctlError:
    return BevctlError(
        f"A data loading process ended: {str(error).splitlines()[0]}.",
        "It was killed or crashed, most often for lack of memory or of /dev/shm: use fewer --workers.",
        ExitCode.RUN_FAILED,
    )
