"""``bench startup``: from the start of the process to the first token a client sees."""

from __future__ import annotations

import asyncio
import datetime
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console
from rich.table import Table

from metrale_async.arguments import argument, violations
from metrale_async.cli.bench.load import Target, first_model, timed_request
from metrale_async.cli.bench.prompts import word_prompt
from metrale_async.cli.bench.report import result_path, write_json
from metrale_async.cli.bench.server_process import server_process
from metrale_async.cli.machine import machine_facts
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.engine.engine_args import DEFAULT_MODEL
from metrale_async.errors import ConfigurationError

TARGET_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupArgs:
    """Flags of ``bench startup``."""

    model: str = DEFAULT_MODEL

    runs: int = argument(5, group="Load", help="starts that are measured", minimum=1, maximum=100)
    serve_flags: str = argument("", group="Server", help="flags for the server, in one quoted text", metavar="FLAGS")
    output_dir: str = argument("bench/results", group="Result", help="folder of the result file", metavar="FOLDER")

    def __post_init__(self) -> None:
        found = violations(self)
        if found:
            raise ConfigurationError(found)


@dataclass(frozen=True, slots=True)
class Start:
    """One start; seconds since the process was created."""

    healthy_s: float
    first_token_s: float


COMMAND_LINE: Final = CommandLine(
    "bench startup",
    "Starts the server several times with warm files and measures when it is healthy and when its first token arrives.",
    positionals=[Positional("model", "what to serve", default=DEFAULT_MODEL)],
    configurations=[StartupArgs],
)


def run(line: Sequence[str]) -> int:
    args = COMMAND_LINE.parse(line).of(StartupArgs)
    return asyncio.run(run_startup(args, Console()))


async def run_startup(args: StartupArgs, console: Console) -> int:
    """Measure, print the table, write the file."""
    now = datetime.datetime.now().astimezone()
    flags = shlex.split(args.serve_flags)
    await one_start(args.model, flags)  # reads the files, so that all that follow find them in the page cache
    starts = [await one_start(args.model, flags) for _ in range(args.runs)]
    table = Table(title=f"Start of {args.model}, {args.runs} runs, warm files", title_justify="left")
    for heading in ("seconds until", "fastest", "median", "slowest"):
        table.add_column(heading, justify="left" if heading == "seconds until" else "right")
    for heading, values in (
        ("healthy", [start.healthy_s for start in starts]),
        ("first token", [start.first_token_s for start in starts]),
    ):
        table.add_row(heading, *(f"{edge(values):.2f}" for edge in (min, statistics.median, max)))
    console.print(table)
    median_s = statistics.median(start.first_token_s for start in starts)
    console.print(f"target: {TARGET_S:g} s to the first token; the median is {median_s / TARGET_S:.0%} of it")
    path = result_path(Path(args.output_dir), "startup", Path(args.model).name, now)
    content = {"time": now.isoformat(timespec="seconds"), "arguments": args, "target_s": TARGET_S, "starts": starts}
    console.print(f"written: {write_json(path, 'startup', machine_facts(), content)}")
    return 0


async def one_start(model: str, flags: Sequence[str]) -> Start:
    async with server_process(model, flags) as server, aiohttp.ClientSession() as session:
        target = Target(base_url=server.base_url, model="")
        served = await first_model(session, server.base_url, target.headers)
        target = Target(base_url=server.base_url, model=served)
        timing = await timed_request(session, target, word_prompt(8, 0), 2)
        return Start(server.ready_s - server.started_s, timing.first_token_s - server.started_s)
