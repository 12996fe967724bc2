"""Checks of section "launch"."""

from __future__ import annotations

from bevctl.preflight.checks import CheckSpec

CHECKS: tuple[CheckSpec, ...] = ()
