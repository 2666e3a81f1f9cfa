"""``bench ladder``: one server under 1, 2, 4 ... 64 streams at once."""

from __future__ import annotations

import asyncio
import datetime
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
from rich.console import Console

from metrale_async.arguments import argument, violations
from metrale_async.cli.bench.load import (
    BenchmarkError,
    Endpoint,
    FailedRequestError,
    Target,
    count_prompt_tokens,
    first_model,
    probe,
    run_level,
)
from metrale_async.cli.bench.prompts import calibrate_words, word_prompt
from metrale_async.cli.bench.report import ladder_svg, ladder_table, result_path, write_json
from metrale_async.cli.bench.server_process import server_process
from metrale_async.cli.bench.statistics import LevelSummary, summarize
from metrale_async.cli.machine import machine_facts
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.errors import ConfigurationError

CONCURRENCY_MAX: Final = 1024
REQUESTS_MIN: Final = 8
"""At each level, so that the percentiles of the first ones say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderArgs:
    """Flags of ``bench ladder``."""

    model: str | None = None

    url: str | None = argument(
        None,
        group="Server",
        help="an OpenAI-compatible server, up to /v1; without it our own is started. A key is read from OPENAI_API_KEY",
        metavar="URL",
    )
    serve_flags: str = argument(
        "", group="Server", help="flags for the server that is started, in one quoted text", metavar="FLAGS"
    )
    endpoint: str = argument(
        "completions", group="Server", help="which of the two is measured", choices=("completions", "chat")
    )

    concurrency: str = argument(
        "1,2,4,8,16,32,64", group="Load", help="streams at once, level by level", metavar="N,N,..."
    )
    prompt_tokens: int = argument(128, group="Load", help="tokens in a prompt", minimum=1, maximum=1_000_000)
    output_tokens: int = argument(128, group="Load", help="tokens in an answer", minimum=2, maximum=1_000_000)
    rounds: int = argument(
        2,
        group="Load",
        help=f"requests of each stream at each level, and at least {REQUESTS_MIN} at each level",
        minimum=1,
        maximum=1000,
    )
    seed: int = argument(0, group="Load", help="chooses the words of the prompts", minimum=0, maximum=2**31)
    request_timeout: float = argument(
        600.0, group="Load", help="seconds after which a request has failed", minimum=1, maximum=86400
    )

    label: str | None = argument(None, group="Result", help="names the files and the chart; default: the model's name")
    output_dir: str = argument("bench/results", group="Result", help="folder of the result files", metavar="FOLDER")

    def __post_init__(self) -> None:
        found = violations(self)
        if self.url is not None and self.serve_flags:
            found.append("--serve-flags are for a server that is started here; leave out --url or --serve-flags")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            found.append(f"--url is {self.url!r}; allowed: an address that starts with http:// or https://")
        try:
            levels = self.levels
        except ValueError:
            levels = [0]
        if not levels or not all(1 <= level <= CONCURRENCY_MAX for level in levels):
            found.append(
                f"--concurrency is {self.concurrency!r}; allowed: integers of 1 to {CONCURRENCY_MAX} between commas"
            )
        if found:
            raise ConfigurationError(found)

    @property
    def levels(self) -> list[int]:
        return [int(level) for level in self.concurrency.split(",")]


COMMAND_LINE: Final = CommandLine(
    "bench ladder",
    "Measures time to first token, time between tokens and output tokens per second under rising concurrency.",
    positionals=[Positional("model", "what to serve; with --url: the model to ask for (default: the first it lists)")],
    configurations=[LadderArgs],
)


def run(line: Sequence[str]) -> int:
    args = COMMAND_LINE.parse(line).of(LadderArgs)
    return asyncio.run(run_ladder(args, Console()))


async def run_ladder(args: LadderArgs, console: Console) -> int:
    """Climb the ladder, print the table, write the files; 1 if a request failed."""
    now = datetime.datetime.now().astimezone()
    timeout = aiohttp.ClientTimeout(total=args.request_timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with _base_url(args) as base_url, aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        target = await _target(session, args, base_url)
        words, tokens = await calibrate_words(
            args.prompt_tokens, lambda prompt: count_prompt_tokens(session, target, prompt), args.seed
        )
        console.print(
            f"{target.url}, model {target.model}: {tokens or f'about {words}'} tokens in, {args.output_tokens} out"
        )
        for missing, present in (("ignore_eos", target.ignore_eos), ("usage counts", target.reports_usage)):
            if not present:
                console.print(f"[yellow]the server knows no {missing}: answers may differ in length[/yellow]")
        rows: list[LevelSummary] = []
        requests: dict[int, list[dict[str, float]]] = {}
        failures: list[str] = []
        seed = args.seed + 1
        for concurrency in args.levels:
            count = max(REQUESTS_MIN, concurrency * args.rounds)
            prompts = [word_prompt(words, seed + index) for index in range(count)]
            seed += count
            level = await run_level(session, target, prompts, args.output_tokens, concurrency)
            rows.append(summarize(level))
            failures += level.failures
            requests[concurrency] = [one.as_milliseconds() for one in level.timings]
            console.print(
                f"  {concurrency:>4} streams: {rows[-1].output_tokens_per_s:,.1f} tok/s in {level.duration_s:.1f} s"
            )
    label = args.label or Path(target.model).name
    title = f"{label}: {args.prompt_tokens} tokens in, {args.output_tokens} out"
    console.print(ladder_table(title, rows))
    path = result_path(Path(args.output_dir), "ladder", label, now)
    content = {
        "label": label,
        "time": now.isoformat(timespec="seconds"),
        "arguments": args,
        "target": {"url": target.url, "ignore_eos": target.ignore_eos, "reports_usage": target.reports_usage},
        "levels": rows,
        "requests": {str(concurrency): of_level for concurrency, of_level in requests.items()},
        "failures": failures[:20],
    }
    written = write_json(path, "ladder", machine_facts(), content)
    picture = written.with_suffix(".svg")
    picture.write_text(ladder_svg(title, {label: rows}), "utf-8")
    console.print(f"written: {written}, {picture}")
    if failures:
        console.print(f"[red]{len(failures)} requests failed, the first with: {failures[0]}[/red]")
    return 1 if failures else 0


@asynccontextmanager
async def _base_url(args: LadderArgs) -> AsyncIterator[str]:
    if args.url is not None:
        yield args.url.rstrip("/")
        return
    from metrale_async.engine.engine_args import DEFAULT_MODEL

    async with server_process(args.model or DEFAULT_MODEL, shlex.split(args.serve_flags)) as server:
        yield server.base_url


async def _target(session: aiohttp.ClientSession, args: LadderArgs, base_url: str) -> Target:
    api_key = os.environ.get("OPENAI_API_KEY") if args.url else None
    endpoint: Endpoint = "chat" if args.endpoint == "chat" else "completions"
    target = Target(base_url=base_url, model=args.model or "", endpoint=endpoint, api_key=api_key)
    if args.url is None or args.model is None:
        model = await first_model(session, base_url, target.headers)
        target = Target(base_url=base_url, model=model, endpoint=endpoint, api_key=api_key)
    try:
        return await probe(session, target, word_prompt(8, args.seed))
    except FailedRequestError as error:
        raise BenchmarkError(f"{target.url} cannot be measured: {error}") from error
