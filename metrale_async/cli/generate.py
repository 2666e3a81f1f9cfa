"""``generate``: one prompt in, one answer out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from metrale_async.arguments import argument, violations
from metrale_async.cli.loading import loaded_engine, run_on_loop
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.cli.sampling_args import SamplingArgs
from metrale_async.engine.engine_args import DEFAULT_MODEL, EngineArgs
from metrale_async.engine.outputs import RequestOutput
from metrale_async.errors import ConfigurationError

if TYPE_CHECKING:
    from metrale_async.engine import AsyncEngine

PROMPT_BYTES_MAX: Final = 64 * 2**20
"""More than any context holds; a device file must not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs:
    """Flags of ``generate`` beside those of engine and sampling."""

    prompt: str | None = None

    model: str = argument(DEFAULT_MODEL, group="Model", help="a path, a catalogue name or a hub id")
    file: str | None = argument(None, group="Prompt", help="file that holds the prompt", metavar="PATH")
    chat: bool = argument(
        False, group="Prompt", help="send the prompt as a user's message, through the model's chat template"
    )
    json: bool = argument(
        False, group="Output", help="print one JSON object at the end: text, token ids, finish_reason, usage"
    )

    def __post_init__(self) -> None:
        found = violations(self)
        if self.prompt is not None and self.file is not None:
            found.append("a prompt and --file are given; one of them is the prompt")
        if found:
            raise ConfigurationError(found)


COMMAND_LINE: Final = CommandLine(
    "generate",
    "Completes a prompt and prints the answer as it comes. The prompt is the argument, a file, or standard input.",
    positionals=[Positional("prompt", "the text to go on from; - or nothing reads standard input")],
    configurations=[GenerateArgs, SamplingArgs, EngineArgs],
)


def run(line: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(line)
    args, sampling = parsed.of(GenerateArgs), parsed.of(SamplingArgs)
    engine_args = dataclasses.replace(parsed.of(EngineArgs), model=args.model)
    run_on_loop(_generate(args, sampling, engine_args, read_prompt(args)))
    return 0


def read_prompt(args: GenerateArgs) -> str:
    """The prompt from wherever the line says it is; raises ConfigurationError if it cannot be had."""
    if args.prompt is not None and args.prompt != "-":
        return args.prompt
    try:
        if args.file is not None:
            with Path(args.file).open("rb") as file:
                data = file.read(PROMPT_BYTES_MAX + 1)
        else:
            if sys.stdin.isatty():
                print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
            data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
        if len(data) > PROMPT_BYTES_MAX:
            raise ConfigurationError(f"the prompt has more than {PROMPT_BYTES_MAX} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigurationError(f"--file {args.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the prompt is not UTF-8 text: {error.reason} at byte {error.start}") from error


async def _generate(args: GenerateArgs, sampling: SamplingArgs, engine_args: EngineArgs, prompt: str) -> None:
    async with loaded_engine(engine_args) as engine:
        params = engine.default_params(**sampling.given())
        request = [{"role": "user", "content": prompt}] if args.chat else prompt
        if args.json:
            output = await engine.complete(request, params)
            sys.stdout.write(_json(engine, output))
            return
        async with contextlib.aclosing(engine.generate(request, params)) as deltas:
            async for delta in deltas:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        sys.stdout.write("\n")


def _json(engine: AsyncEngine, output: RequestOutput) -> str:
    choice = output.choices[0]
    content = {
        "model": engine.model_name,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_token_ids": output.prompt_token_ids,
        "usage": output.usage,
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
