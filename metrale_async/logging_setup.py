"""Log lines: plain text for people or JSON for machines, on standard error. Only programs call this, never a library.

A record may carry ``extra={"fields": {...}}``: values that belong to the line by name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final, TextIO

ROOT_LOGGER: Final = "metrale_async"
FORMATS: Final = ("text", "json")


def configure_logging(log_format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send the package's log lines to ``stream`` (standard error), and warnings of everything else too.

    May be called again; the last call holds.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if getattr(old, "_metrale", False)]:
        root.removeHandler(old)
    handler._metrale = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in (ROOT_LOGGER, "metrale_kernels", "metrale_storage"):
        logging.getLogger(name).setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the record's fields, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message, then ``name=value`` for the record's fields; a message never breaks its line."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_utc(record), record.levelname.lower(), _one_line(record.getMessage())]
        words += [f"{name}={_one_line(str(value))}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _one_line(text: str) -> str:
    """Control characters, line breaks above all, as escapes: a client must not be able to forge a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
