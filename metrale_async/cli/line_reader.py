"""Lines from standard input without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading


class LineReader:
    """Reads a line when asked to, with line editing where there is a terminal.

    A thread of its own waits for the keyboard. It is a daemon: nothing can wake it from waiting for a key, so nothing
    can wait for it.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[str, asyncio.Future[str | None]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_forever, name="metrale-line-reader", daemon=True)

    async def read(self, prompt: str) -> str | None:
        """The next line without its end, after showing ``prompt``; None at the end of input."""
        if not self._thread.is_alive():
            if sys.stdin.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  (gives input() editing and history)
            self._thread.start()
        line: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._wanted.put((prompt, line))
        return await line

    def _read_forever(self) -> None:
        while True:
            prompt, line = self._wanted.get()
            try:
                text = input(prompt)
            except EOFError:
                self._deliver(line, None)
            except (UnicodeDecodeError, OSError) as error:
                self._deliver(line, error)
            else:
                self._deliver(line, text)

    def _deliver(self, line: asyncio.Future[str | None], result: str | Exception | None) -> None:
        def deliver() -> None:
            if line.done():
                return
            if isinstance(result, Exception):
                line.set_exception(result)
            else:
                line.set_result(result)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants the line any more
            line.get_loop().call_soon_threadsafe(deliver)
