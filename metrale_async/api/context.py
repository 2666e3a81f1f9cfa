"""What handlers find in the application and in a request, under typed keys."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from metrale_async.api.auth import TokenCheck
from metrale_async.api.metrics import Metrics
from metrale_async.api.request_log import RequestSummary
from metrale_async.api.server_args import ServerArgs
from metrale_async.engine import AsyncEngine
from metrale_async.errors import EngineUnavailableError, UnknownModelError


@dataclass(frozen=True, slots=True)
class Service:
    """The engine behind the routes, and the name it is known by."""

    engine: AsyncEngine
    args: ServerArgs
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time, for the model list."""

    @property
    def model_id(self) -> str:
        """Raises EngineUnavailableError while the model is loading."""
        return self.args.served_model_name or self.engine.model_name

    def check_ready(self) -> None:
        """Refuse work before its body is read. Raises EngineUnavailableError."""
        if not self.engine.is_ready:
            raise EngineUnavailableError("the server takes no requests now: it is starting or shutting down")

    def check_model(self, wanted: str | None) -> str:
        """The id to answer with. Raises UnknownModelError if the request names a model that is not served."""
        if wanted is not None and wanted != self.model_id:
            raise UnknownModelError(
                f"the model {wanted[:256]!r} is not served here; there is {self.model_id!r}", param="model"
            )
        return self.model_id


SERVICE: Final = web.AppKey("service", Service)
METRICS: Final = web.AppKey("metrics", Metrics)
TOKENS: Final = web.AppKey("tokens", TokenCheck)
SUMMARY: Final = web.RequestKey("summary", RequestSummary)
