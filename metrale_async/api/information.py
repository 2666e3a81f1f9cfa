"""GET /health, /health/live, /metrics, /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from metrale_async.api.context import METRICS, SERVICE, Service
from metrale_async.api.failures import json_response
from metrale_async.errors import UnknownModelError


async def health(request: web.Request) -> web.Response:
    """200 when a request would be accepted now, else 503."""
    request.app[SERVICE].check_ready()
    return json_response({"status": "ready"})


async def live(request: web.Request) -> web.Response:
    """200 as long as the event loop runs, while the model is loading too."""
    return json_response({"status": "alive"})


async def metrics(request: web.Request) -> web.Response:
    text, content_type = request.app[METRICS].exposition()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def list_models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def show_model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    wanted = request.match_info["model_id"]
    if wanted != service.model_id:
        raise UnknownModelError(f"the model {wanted[:256]!r} is not served here; there is {service.model_id!r}")
    return json_response(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.started_at,
        "owned_by": "metrale-async",
        "root": service.engine.model_name,
        "parent": None,
        "max_model_len": service.engine.max_seq_len,
    }
