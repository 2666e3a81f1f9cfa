"""Fixtures of the HTTP tests."""

from __future__ import annotations

import io
import logging

import pytest

from metrale_async.logging_setup import configure_logging


@pytest.fixture
def log():
    """The log's text, in the form and at the level a test asks for."""
    before = logging.getLogger().handlers[:], logging.getLogger("metrale_async").level, logging.getLogger().level
    stream = io.StringIO()

    def start(log_format: str, level: str = "info") -> io.StringIO:
        configure_logging(log_format, level, stream)
        return stream

    yield start
    logging.getLogger().handlers[:] = before[0]
    logging.getLogger("metrale_async").setLevel(before[1])
    logging.getLogger().setLevel(before[2])
