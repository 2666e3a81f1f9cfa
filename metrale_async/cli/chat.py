"""``chat``: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rich.console import Console

from metrale_async.arguments import argument
from metrale_async.cli.line_reader import LineReader
from metrale_async.cli.loading import loaded_engine, run_on_loop
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.cli.sampling_args import SamplingArgs
from metrale_async.engine.engine_args import DEFAULT_MODEL, EngineArgs
from metrale_async.engine.sampling_params import SamplingParams
from metrale_async.errors import RequestError

if TYPE_CHECKING:
    from metrale_async.engine import AsyncEngine

PROMPT: Final = "> "
HELP: Final = """\
/reset          forget the conversation
/system TEXT    set the system message, and forget the conversation; without TEXT there is none
/help           show this
Ctrl-C stops an answer, Ctrl-D leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArgs:
    """Flags of ``chat`` beside those of engine and sampling."""

    system: str | None = argument(None, group="Conversation", help="the system message")


COMMAND_LINE: Final = CommandLine(
    "chat",
    "Talks to a model in the terminal. From a pipe each line is a message, and only answers are printed.",
    positionals=[Positional("model", "a path, a catalogue name or a hub id", DEFAULT_MODEL)],
    configurations=[ChatArgs, SamplingArgs, EngineArgs],
    epilog=HELP,
)


@dataclass(slots=True)
class Conversation:
    """The messages so far."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})


def run(line: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(line)
    return run_on_loop(_run(parsed.of(ChatArgs), parsed.of(SamplingArgs), parsed.of(EngineArgs)))


async def _run(args: ChatArgs, sampling: SamplingArgs, engine_args: EngineArgs) -> int:
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    async with loaded_engine(engine_args) as engine:
        params = engine.default_params(**sampling.given())
        chat = Chat(engine, params, Conversation(args.system), Console(highlight=False), interactive)
        with chat.stopping_on_interrupt():
            return await chat.talk(LineReader())


class Chat:
    """One conversation until its input ends."""

    def __init__(
        self, engine: AsyncEngine, params: SamplingParams, talk: Conversation, console: Console, interactive: bool
    ) -> None:
        self._engine = engine
        self._params = params
        self._conversation = talk
        self._console = console
        self._interactive = interactive
        self._answering: asyncio.Task[None] | None = None
        self._refused = False

    async def talk(self, reader: LineReader) -> int:
        """Answer line after line; returns the exit code: 1 if a message was refused and nobody was there to see it."""
        if self._interactive:
            self._console.print(f"[bold]{self._engine.model_name}[/bold] [dim]/help shows the commands[/dim]")
        prompt = PROMPT if self._interactive else ""
        while (line := await reader.read(prompt)) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                self._obey(line)
                continue
            # A group of its own lets Ctrl-C cancel the answer and nothing else.
            async with asyncio.TaskGroup() as group:
                self._answering = group.create_task(self._answer(line))
            self._answering = None
        if self._interactive:
            self._console.print()
        return 1 if self._refused and not self._interactive else 0

    @contextlib.contextmanager
    def stopping_on_interrupt(self) -> Iterator[None]:
        """While this lasts, Ctrl-C ends the answer under way, and nothing while there is none."""
        loop = asyncio.get_running_loop()
        if not self._interactive:
            yield
            return
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def interrupt(self) -> None:
        """Ctrl-C."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            print("\n(Ctrl-D leaves)\n" + PROMPT, end="", flush=True)

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self._conversation.turns.clear()
            self._note("the conversation is forgotten")
        elif command == "/system":
            self._conversation = Conversation(rest.strip() or None)
            self._note("the system message is set" if rest.strip() else "there is no system message")
        elif command == "/help":
            self._note(HELP)
        else:
            self._note(f"{command} is not a command\n{HELP}")

    def _note(self, text: str) -> None:
        """Tell a person something; a pipe gets answers only."""
        if self._interactive:
            self._console.print(text, style="dim", markup=False)
        else:
            print(text, file=sys.stderr)

    async def _answer(self, message: str) -> None:
        self._conversation.add("user", message)
        said: list[str] = []
        started_s = time.perf_counter()
        try:
            async with contextlib.aclosing(self._engine.generate(self._conversation.messages, self._params)) as deltas:
                async for delta in deltas:
                    said.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    if delta.usage is not None and self._interactive:
                        tokens, duration_s = delta.usage.completion_tokens, time.perf_counter() - started_s
                        sys.stdout.write("\n")
                        self._note(f"{tokens} tokens, {tokens / duration_s:.0f} per second, {delta.finish_reason}")
                    elif delta.usage is not None:
                        sys.stdout.write("\n")
                        sys.stdout.flush()
        except RequestError as error:
            # It was refused as a whole, so the conversation goes on as if it had not been sent.
            self._conversation.turns.pop()
            self._refused = True
            self._note(f"{error}\n/reset forgets the conversation")
            return
        except asyncio.CancelledError:
            sys.stdout.write("\n")
            self._note("stopped")
            self._remember(said)
            raise
        self._remember(said)

    def _remember(self, said: Sequence[str]) -> None:
        self._conversation.add("assistant", "".join(said))
