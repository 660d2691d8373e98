"""Plug-ins that run in the process of a test get more time."""

from __future__ import annotations

from tests.patient_plugins import patient_with_plugins

__all__ = ["patient_with_plugins"]
