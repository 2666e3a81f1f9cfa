"""The HTTP surface: an aiohttp application in OpenAI's shapes, and the server around it. Owns request schemas, limits,
server-sent events, errors as responses, authentication, metrics and the request log; may import ``engine``, ``text``
and what is below them, and is imported by ``cli`` and tests only."""

from metrale_async.api.app import build_app
from metrale_async.api.metrics import Metrics
from metrale_async.api.server import run_server
from metrale_async.api.server_args import ServerArgs

__all__ = ["Metrics", "ServerArgs", "build_app", "run_server"]
