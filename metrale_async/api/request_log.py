"""One line for every finished request, with what is known of it and no text of it."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from metrale_async.api.limits import MAX_REQUEST_ID_CHARS
from metrale_async.engine import OutputDelta, RequestOutput
from metrale_async.errors import InvalidRequestError

REQUEST_ID_HEADER: Final = "X-Request-Id"
LOGGED_PROMPT_CHARS: Final = 200
CLIENT_LEFT: Final = 499
"""Status in the log (never sent) of a request whose client left before the answer was complete."""

_PLAIN_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID_CHARS}}}")
_LOGGED_NAMES: Final = 16
_LOGGED_NAME_CHARS: Final = 64

logger = logging.getLogger("metrale_async.request")


def request_id_of(request: web.Request) -> str:
    """The client's own id if it is one that can be logged and sent back, else a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _PLAIN_ID.fullmatch(given) else secrets.token_hex(12)


def note_request_id(request: web.Request, summary: RequestSummary, given: str | None) -> None:
    """Take the id that the body gives, unless the header gave one. Raises InvalidRequestError."""
    if given is None:
        return
    if not _PLAIN_ID.fullmatch(given):
        raise InvalidRequestError(
            f"request_id must have 1 to {MAX_REQUEST_ID_CHARS} letters, digits and . _ : -", param="request_id"
        )
    if summary.request_id != request.headers.get(REQUEST_ID_HEADER):
        summary.request_id = given


@dataclass(slots=True)
class RequestSummary:
    """Filled in while a request is served."""

    request_id: str
    started_s: float = field(default_factory=time.perf_counter)
    response_id: str | None = None
    """The answer's own id, which is how the engine knows the request."""
    stream: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    choices: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    error_code: str | None = None
    left: str | None = None
    """Why sending the answer was given up."""
    ignored_fields: list[str] = field(default_factory=list)
    prompt: str | None = None

    def note_batch(self, batch: Sequence[OutputDelta]) -> None:
        """Deltas that are about to be sent."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started_s
        for delta in batch:
            if delta.finish_reason is not None:
                self.finish_reasons.append(delta.finish_reason)
            if delta.usage is not None:
                self.completion_tokens = (self.completion_tokens or 0) + delta.usage.completion_tokens

    def note_output(self, outputs: Sequence[RequestOutput]) -> None:
        """Whole answers."""
        self.completion_tokens = sum(output.usage.completion_tokens for output in outputs)
        self.finish_reasons = [choice.finish_reason for output in outputs for choice in output.choices]

    def log(self, request: web.Request, status: int) -> None:
        """Write the line; probes and scrapes only at debug level."""
        level = logging.DEBUG if request.method in ("GET", "HEAD") and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        duration_s = time.perf_counter() - self.started_s
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "response_id": self.response_id,
            "method": request.method,
            "path": request.path[:128],
            "status": status,
            "duration_ms": round(duration_s * 1000, 1),
            "first_token_ms": None if self.first_token_s is None else round(self.first_token_s * 1000, 1),
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "choices": self.choices,
            "finish_reasons": ",".join(sorted(set(self.finish_reasons))) or None,
            "error_code": self.error_code,
            "left": self.left,
            "ignored_fields": _shortened(self.ignored_fields),
            "prompt": self.prompt,
        }
        known = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, "request", extra={"fields": known})


def _shortened(names: Sequence[str]) -> str | None:
    """A client chooses how many there are and how long, and must not fill the log with them."""
    shown = [name[:_LOGGED_NAME_CHARS] for name in names[:_LOGGED_NAMES]]
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown)} more")
    return ",".join(shown) or None
