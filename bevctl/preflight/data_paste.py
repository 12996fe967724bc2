"""The check of what data.paste needs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bevctl.config.document import display
from bevctl.errors import BevctlError
from bevctl.preflight.checks import Context, Outcome, failed, passed, skipped, warned


def object_database(context: Context) -> Outcome:
    """DATA009: the database of objects to paste is there, whole, and has objects of each class that is pasted."""
    from bevctl.data.gt_database import read_gt_database

    config = context.config
    if config is None or config.data.paste is None:
        return skipped("the config pastes no objects")
    paste = config.data.paste
    path = Path(config.data.root) / paste.database
    try:
        database = read_gt_database(path)
    except BevctlError as error:
        return failed(error.message, error.hint)
    usable = Counter(database.names[database.count(config.data.sweeps) >= max(1, paste.min_points)].tolist())
    absent = [name for name in config.data.classes if getattr(paste.counts, name) and not usable[name]]
    said = f"{display(path)}: {sum(usable.values()):,} objects with at least {paste.min_points} points"
    if absent:
        return warned(f"{said}, none of {', '.join(absent)}", "Make it from the training split: `bevctl data prepare`.")
    return passed(said)
