"""Errors of this package."""

from __future__ import annotations


class KernelUnavailableError(RuntimeError):
    """The implementation that was asked for cannot run here; the message says why."""
