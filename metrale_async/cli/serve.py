"""``serve``: the HTTP server, from flags to the curl line that greets the user."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from typing import Final

import orjson

from metrale_async.api.server_args import ServerArgs
from metrale_async.cli.loading import loading_bar, run_on_loop
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.engine.engine_args import DEFAULT_MODEL, EngineArgs

COMMAND_LINE: Final = CommandLine(
    "serve",
    "Serves a model over HTTP with the OpenAI API, until SIGTERM or Ctrl-C. Health answers 503 while the model loads.",
    positionals=[Positional("model", "a path, a catalogue name or a hub id", DEFAULT_MODEL)],
    configurations=[ServerArgs, EngineArgs],
)


def run(line: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(line)
    server_args = parsed.of(ServerArgs)
    run_on_loop(
        _serve(parsed.of(EngineArgs), server_args), log_format=server_args.log_format, log_level=server_args.log_level
    )
    return 0


async def _serve(engine_args: EngineArgs, server_args: ServerArgs) -> None:
    from metrale_async.api import Metrics, run_server
    from metrale_async.engine import AsyncEngine

    metrics = Metrics()
    with contextlib.ExitStack() as until_ready:
        engine = AsyncEngine(engine_args, observer=metrics, progress=until_ready.enter_context(loading_bar()))

        def greet(url: str) -> None:
            until_ready.close()
            name = server_args.served_model_name or engine.model_name
            print(greeting(url, name, with_token=server_args.require_auth), flush=True)

        await run_server(engine, server_args, metrics=metrics, on_ready=greet)


def greeting(url: str, model: str, *, with_token: bool) -> str:
    """What is printed when the first request would be served: a command that can be pasted into a shell."""
    message = {"role": "user", "content": "Tell me a joke about a river."}
    body = orjson.dumps({"model": model, "messages": [message], "max_tokens": 64, "stream": True}).decode()
    lines = [
        f"curl -N {url}/v1/chat/completions",
        "-H 'Content-Type: application/json'",
        *(['-H "Authorization: Bearer $TOKEN"'] if with_token else []),
        f"-d {shlex.quote(body)}",
    ]
    return f"\nServing {model} on {url}. Try:\n\n" + " \\\n  ".join(lines) + "\n"
