"""Checks of section "system"."""

from __future__ import annotations

from bevctl.preflight.checks import CheckSpec

CHECKS: tuple[CheckSpec, ...] = ()
