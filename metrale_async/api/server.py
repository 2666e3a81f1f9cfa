"""The server's life: listen at once, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from metrale_async.api.app import build_app
from metrale_async.api.limits import KEEP_ALIVE_S, LINGER_S, MAX_HEADER_BYTES
from metrale_async.api.listening import listening_sockets
from metrale_async.api.metrics import Metrics
from metrale_async.api.server_args import ServerArgs
from metrale_async.engine import AsyncEngine
from metrale_async.errors import ConfigurationError

GOODBYE_S: Final = 2.0
"""How long responses that were ended by the shutdown may take to reach their clients."""
LISTEN_BACKLOG: Final = 1024
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

logger = logging.getLogger(__name__)


async def run_server(
    engine: AsyncEngine,
    args: ServerArgs,
    *,
    metrics: Metrics | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    ``engine`` is not started yet and is closed at the end; ``metrics`` is its observer. The callbacks get the server's
    URL: when the port is open (health answers 503), and when the first request would be served. The first signal stops
    admission and lets running requests go on for ``--drain-timeout`` seconds; a second one ends them at once.
    Raises ConfigurationError if the address cannot be used, and what ``AsyncEngine.start`` raises.
    """
    app = build_app(engine, args, metrics)
    with _signals() as signals:
        if args.host not in _LOOPBACK and not args.require_auth:
            logger.warning("--host %s is reachable from other machines, and --require-auth is not given", args.host)
        try:
            runner, url = await start_site(app, args.host, args.port)
        except OSError as error:
            where = f"--host {args.host} --port {args.port}"
            raise ConfigurationError(f"{where} cannot be used: {error.strerror}") from error
        try:
            on_listening(url)
            try:
                if await _start(engine, signals):
                    # What was made so far stays. Looking through it again and again for garbage would stop the loop
                    # for some 50 ms every time.
                    gc.collect()
                    gc.freeze()
                    logger.info("ready", extra={"fields": {"url": url}})
                    on_ready(url)
                    await signals.wait_for(1)
                    await _drain(engine, args, signals)
            finally:
                # Requests that still run are failed by this, and their streams end with an error event.
                await engine.close()
        finally:
            gc.unfreeze()
            await runner.cleanup()
    logger.info("stopped")


async def start_site(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Listen, as :func:`run_server` does, and return the runner (to be cleaned up) and the URL. Raises OSError."""
    runner = web.AppRunner(
        app,
        # A client that leaves cancels its request at once.
        handler_cancellation=True,
        # Compressed bodies are refused, not unpacked: a few bytes must not become gigabytes.
        auto_decompress=False,
        access_log=None,
        logger=_http_logger(),
        keepalive_timeout=KEEP_ALIVE_S,
        lingering_time=LINGER_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        shutdown_timeout=GOODBYE_S,
    )
    sockets = await listening_sockets(host, port)
    try:
        await runner.setup()
        for listening in sockets:
            await web.SockSite(runner, listening, backlog=LISTEN_BACKLOG).start()
    except BaseException:
        await runner.cleanup()
        for listening in sockets:
            listening.close()
        raise
    # With port 0 the system chose one.
    chosen = runner.addresses[0][1]
    return runner, f"http://{f'[{host}]' if ':' in host else host}:{chosen}"


async def _start(engine: AsyncEngine, signals: _Signals) -> bool:
    """Load the model; False if a signal came first."""
    starting = asyncio.create_task(engine.start(), name="metrale-engine-start")
    stopping = asyncio.create_task(signals.wait_for(1), name="metrale-first-signal")
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            return True
        return False
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _drain(engine: AsyncEngine, args: ServerArgs, signals: _Signals) -> None:
    engine.stop_admission()
    running = engine.statistics().requests_active
    logger.info("draining", extra={"fields": {"requests": running, "timeout_s": args.drain_timeout}})
    draining = asyncio.create_task(engine.drain(args.drain_timeout), name="metrale-drain")
    hurrying = asyncio.create_task(signals.wait_for(2), name="metrale-second-signal")
    try:
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (draining, hurrying):
            task.cancel()
        await asyncio.gather(draining, hurrying, return_exceptions=True)
    left = engine.statistics().requests_active
    if left:
        logger.warning("ending requests that did not finish in time", extra={"fields": {"requests": left}})


class _Signals:
    """How many were received."""

    def __init__(self) -> None:
        self._received = 0
        self._changed = asyncio.Event()

    def received(self) -> None:
        self._received += 1
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        while self._received < count:
            self._changed.clear()
            await self._changed.wait()


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    loop = asyncio.get_running_loop()
    signals = _Signals()
    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, signals.received)
    try:
        yield signals
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def _http_logger() -> logging.Logger:
    """aiohttp's own lines, less the tracebacks it writes for bytes that are not HTTP: a client could fill the log."""
    http_logger = logging.getLogger("metrale_async.http")
    if not any(isinstance(known, _NotTheClientsFault) for known in http_logger.filters):
        http_logger.addFilter(_NotTheClientsFault())
    return http_logger


class _NotTheClientsFault(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | ConnectionError)
