"""The logger that everything writes to."""

from __future__ import annotations

import logging


class MMLogger:
    @staticmethod
    def get_current_instance() -> logging.Logger:
        return logging.getLogger("fake mmengine")
