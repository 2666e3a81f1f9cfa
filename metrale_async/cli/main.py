"""The entry point: which command runs, and how its failure is told."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from metrale_async import __version__
from metrale_async.cli.environment import VARIABLES
from metrale_async.cli.parsing import PROGRAM
from metrale_async.errors import ConfigurationError, MetraleError


@dataclass(frozen=True, slots=True)
class Command:
    """What a command does, and the ``module:function`` that does it, imported when it runs."""

    summary: str
    target: str

    def load(self) -> Callable[[Sequence[str]], int]:
        module, _, function = self.target.partition(":")
        run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"metrale_async.cli.{module}"), function)
        return run


COMMANDS: Final[Mapping[str, Command]] = {
    "serve": Command("serve a model over HTTP, OpenAI-compatible", "serve:run"),
    "generate": Command("complete one prompt and print the answer", "generate:run"),
    "chat": Command("talk to a model in the terminal", "chat:run"),
    "models list": Command("show the models this machine has and the names of the catalogue", "models:run_list"),
    "models pull": Command("fetch a model", "models:run_pull"),
    "bench ladder": Command("measure a server under 1 to 64 streams at once", "bench.ladder:run"),
    "bench startup": Command("measure the time from process start to first token", "bench.startup:run"),
    "doctor": Command("show this machine, and what the engine would choose on it", "doctor:run"),
}

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(line: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); returns the exit code."""
    words = list(sys.argv[1:] if line is None else line)
    if words[:1] in (["-h"], ["--help"], ["help"]):
        print(overview())
        return 0
    if words[:1] in (["-V"], ["--version"]):
        print(f"metrale-async {__version__}")
        return 0
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return _run(name, words[length:])
    return _refuse_command(words)


def overview(group: str = "") -> str:
    """The commands, or those of one group such as ``models``."""
    shown = {name: command.summary for name, command in COMMANDS.items() if name.startswith(group)}
    lines = [f"usage: {PROGRAM} COMMAND [flags]", "", "commands:"]
    lines += [f"  {name:<16}{summary}" for name, summary in shown.items()]
    if not group:
        lines += ["", "environment variables:"]
        lines += [f"  {name:<20}{variable.help} ({variable.allowed})" for name, variable in VARIABLES.items()]
    lines += ["", f"{PROGRAM} COMMAND --help shows a command's flags."]
    return "\n".join(lines)


def _run(name: str, line: list[str]) -> int:
    try:
        return COMMANDS[name].load()(line)
    except ConfigurationError as error:
        print(_refusal(name, error.violations), file=sys.stderr)
        return EXIT_USAGE
    except MetraleError as error:
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left. The interpreter must not stumble over it again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _refuse_command(words: Sequence[str]) -> int:
    group = words[0] if words else ""
    if group and any(name.startswith(f"{group} ") for name in COMMANDS):
        wanted = " ".join(words[:2])
        if len(words) == 1 or words[1] in ("-h", "--help"):
            print(overview(f"{group} "), file=sys.stdout if len(words) > 1 else sys.stderr)
            return 0 if len(words) > 1 else EXIT_USAGE
    elif group:
        wanted = group
    else:
        print(overview(), file=sys.stderr)
        return EXIT_USAGE
    close = difflib.get_close_matches(wanted, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(COMMANDS)}"
    print(f"{PROGRAM}: {wanted!r} is not a command; {hint}", file=sys.stderr)
    return EXIT_USAGE


def _refusal(name: str, violations: Sequence[str]) -> str:
    """Every violation in one message."""
    head = f"{PROGRAM} {name}: "
    if len(violations) == 1:
        head += violations[0]
        body = []
    else:
        head += f"{len(violations)} things are wrong:"
        body = [f"  {violation}" for violation in violations]
    return "\n".join([head, *body, f"See {PROGRAM} {name} --help."])
