"""The application: routes, and the one place where requests get an id, are let in, and failures become responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from metrale_async.api import chat, completions, information, tokenization
from metrale_async.api.auth import TokenCheck
from metrale_async.api.context import METRICS, SERVICE, SUMMARY, TOKENS, Service
from metrale_async.api.failures import error_response, http_exception_response, json_response, unexpected_error_object
from metrale_async.api.loop_lag import measure_loop_lag
from metrale_async.api.metrics import Metrics
from metrale_async.api.request_log import CLIENT_LEFT, REQUEST_ID_HEADER, RequestSummary, request_id_of
from metrale_async.api.sending import ClientLeftError, send_whole
from metrale_async.api.server_args import ServerArgs
from metrale_async.engine import AsyncEngine
from metrale_async.errors import EngineError, RequestError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PUBLIC: Final = (information.health, information.live)
"""Handlers that ask for no token."""

logger = logging.getLogger(__name__)


def build_app(engine: AsyncEngine, args: ServerArgs | None = None, metrics: Metrics | None = None) -> web.Application:
    """The HTTP surface of an engine, which may still be loading. ``metrics`` is the engine's observer; without it
    there are no histograms. Raises ConfigurationError if the tokens file cannot be used."""
    args = args if args is not None else ServerArgs()
    metrics = metrics if metrics is not None else Metrics()
    metrics.watch(engine)
    app = web.Application(middlewares=[_outcome, _admission], client_max_size=args.max_body_bytes)
    app[SERVICE] = Service(engine, args)
    app[METRICS] = metrics
    if args.auth_tokens_file is not None:
        app[TOKENS] = TokenCheck.from_file(Path(args.auth_tokens_file))
    for method, path, handler in (
        ("POST", "/v1/chat/completions", chat.chat_completions),
        ("POST", "/v1/completions", completions.completions),
        ("POST", "/tokenize", tokenization.tokenize),
        ("POST", "/detokenize", tokenization.detokenize),
        ("GET", "/v1/models", information.list_models),
        # Hub ids hold a slash.
        ("GET", "/v1/models/{model_id:.+}", information.show_model),
        ("GET", "/health", information.health),
        ("GET", "/health/live", information.live),
        ("GET", "/metrics", information.metrics),
    ):
        add = app.router.add_get if method == "GET" else app.router.add_post  # the former answers HEAD too
        add(path, handler, expect_handler=_expect_later)
    app.cleanup_ctx.append(_loop_lag)
    return app


async def _expect_later(request: web.Request) -> None:
    """Nobody is told to go on (``Expect: 100-continue``) before the token was checked; reading the body does that."""


async def _loop_lag(app: web.Application) -> AsyncIterator[None]:
    measuring = asyncio.create_task(measure_loop_lag(app[METRICS].loop_lag), name="metrale-loop-lag")
    yield
    measuring.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await measuring


@web.middleware
async def _outcome(request: web.Request, handler: Handler) -> web.StreamResponse:
    summary = request[SUMMARY] = RequestSummary(request_id_of(request))
    status = CLIENT_LEFT
    try:
        response = await _response(request, handler)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = summary.request_id
        if isinstance(response, web.Response):
            response = await send_whole(request, response)
        status = response.status
        return response
    except ClientLeftError as error:
        summary.left = str(error)
        # The connection is closed, so whatever is returned goes nowhere.
        return web.Response(status=CLIENT_LEFT)
    finally:
        resource = request.match_info.route.resource
        request.app[METRICS].response_sent("unknown" if resource is None else resource.canonical, status)
        summary.log(request, status)


async def _response(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's response, or the one that tells its failure."""
    summary = request[SUMMARY]
    try:
        return await handler(request)
    except (RequestError, EngineError) as error:
        summary.error_code = error.code
        return error_response(error)
    except web.HTTPException as error:
        return http_exception_response(error)
    except ClientLeftError:
        raise
    except Exception:
        logger.exception("a request failed", extra={"fields": {"request_id": summary.request_id}})
        summary.error_code = "internal_error"
        return json_response(unexpected_error_object(), status=500)


@web.middleware
async def _admission(request: web.Request, handler: Handler) -> web.StreamResponse:
    if TOKENS in request.app and request.match_info.handler not in PUBLIC:
        request.app[TOKENS].check(request.headers.get("Authorization"))
    return await handler(request)
