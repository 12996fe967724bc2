"""Checks of section "gpu"."""

from __future__ import annotations

from bevctl.preflight.checks import CheckSpec

CHECKS: tuple[CheckSpec, ...] = ()
