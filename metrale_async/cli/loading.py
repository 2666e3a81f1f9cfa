"""An engine with its model loaded, and the bar that shows the loading."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from metrale_async.engine.engine_args import EngineArgs
from metrale_async.logging_setup import configure_logging

if TYPE_CHECKING:
    from metrale_async.engine import AsyncEngine

Result = TypeVar("Result")


def run_on_loop(main: Coroutine[Any, Any, Result], *, log_format: str = "text", log_level: str = "warning") -> Result:
    """Run a command's coroutine on the event loop that the engine is made for, with log lines on standard error."""
    configure_logging(log_format, log_level, cast("TextIO", _CurrentStandardError()))
    return uvloop.run(main)


@contextlib.contextmanager
def loading_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function to be called with (what is loaded, bytes done, bytes in all) from any thread.

    The bar is drawn on standard error and vanishes at the end; where that is no terminal nothing is drawn.
    """
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("model", total=None)

        def report(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        yield report


@contextlib.asynccontextmanager
async def loaded_engine(args: EngineArgs) -> AsyncIterator[AsyncEngine]:
    """An engine that is ready; closed on leaving. Raises ModelError or ConfigurationError if it cannot be."""
    from metrale_async.engine import AsyncEngine

    async with contextlib.AsyncExitStack() as stack:
        with loading_bar() as report:
            engine = await stack.enter_async_context(AsyncEngine(args, progress=report))
        yield engine


class _CurrentStandardError(io.TextIOBase):
    """Writes to what ``sys.stderr`` is at the moment: a bar puts a stream there that keeps lines clear of it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
