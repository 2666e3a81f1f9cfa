"""The HTTP surface: an aiohttp application in OpenAI's shapes, and the server around it. Owns request schemas, limits,
server-sent events, errors as responses, authentication, metrics and the request log; may import ``engine``, ``text``
and what is below them, and is imported by ``cli`` and tests only."""

import importlib
from typing import TYPE_CHECKING, Any

from metrale_async.api.server_args import ServerArgs

if TYPE_CHECKING:
    from metrale_async.api.app import build_app
    from metrale_async.api.metrics import Metrics
    from metrale_async.api.server import run_server
else:
    # These bring torch, and the command line's --help need not wait a second for it.
    _MODULES = {"Metrics": "metrics", "build_app": "app", "run_server": "server"}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = ["Metrics", "ServerArgs", "build_app", "run_server"]
