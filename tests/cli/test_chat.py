"""A conversation: what the model is sent, what a pipe gets, and how an answer is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rich.console import Console

from metrale_async.cli.chat import Chat, ChatArgs, Conversation
from metrale_async.cli.sampling_args import SamplingArgs
from metrale_async.engine.outputs import OutputDelta, Usage
from metrale_async.engine.sampling_params import SamplingParams
from metrale_async.errors import ConfigurationError, RequestTooLongError


class ParrotEngine:
    """Answers a message with its own words, one delta each; refuses more than ``turns_max`` messages."""

    model_name = "parrot"

    def __init__(self, turns_max: int = 100) -> None:
        self.turns_max = turns_max
        self.seen: list[list[dict[str, str]]] = []
        self.gate: asyncio.Event | None = None
        """When set, an answer waits for it after its first word."""
        self.first_word_said = asyncio.Event()
        self.left_early = 0
        self.answer_left = asyncio.Event()

    async def generate(self, prompt: Any, params: SamplingParams) -> AsyncGenerator[OutputDelta, None]:
        self.seen.append([dict(message) for message in prompt])
        if len(prompt) > self.turns_max:
            raise RequestTooLongError("too long")
        words = prompt[-1]["content"].split()
        finished = False
        try:
            for index, word in enumerate(words):
                yield OutputDelta("r", 0, f"{word} ", (index,))
                self.first_word_said.set()
                if self.gate is not None:
                    await self.gate.wait()
            yield OutputDelta("r", 0, "!", (), finish_reason="stop", usage=Usage(1, len(words)))
            finished = True
        finally:
            self.left_early += not finished
            self.answer_left.set()


class Lines:
    """What the user types."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = iter(lines)

    async def read(self, prompt: str) -> str | None:
        return next(self._lines, None)


def a_chat(engine: ParrotEngine, *, system: str | None = None, interactive: bool = False) -> Chat:
    console = Console(quiet=True)
    return Chat(engine, SamplingParams(), Conversation(system), console, interactive)  # type: ignore[arg-type]


async def talk(chat: Chat, *lines: str) -> int:
    return await chat.talk(Lines(lines))  # type: ignore[arg-type]


def contents(messages: Sequence[dict[str, str]]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


async def test_each_message_is_sent_with_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ParrotEngine()
    assert await talk(a_chat(engine, system="be brief"), "hello you", "", "and again") == 0
    assert contents(engine.seen[1]) == [
        "system: be brief",
        "user: hello you",
        "assistant: hello you !",
        "user: and again",
    ]
    assert capsys.readouterr().out == "hello you !\nand again !\n"


async def test_reset_forgets_the_conversation_but_not_the_system_message() -> None:
    engine = ParrotEngine()
    await talk(a_chat(engine, system="be brief"), "one", "/reset", "two")
    assert contents(engine.seen[1]) == ["system: be brief", "user: two"]


async def test_system_sets_the_system_message_and_forgets_the_conversation() -> None:
    engine = ParrotEngine()
    await talk(a_chat(engine), "one", "/system speak Latin", "two", "/system", "three")
    assert contents(engine.seen[1]) == ["system: speak Latin", "user: two"]
    assert contents(engine.seen[2]) == ["user: three"]


async def test_commands_and_notes_do_not_reach_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    await talk(a_chat(ParrotEngine()), "/help", "/nonsense", "/reset")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "/nonsense is not a command" in printed.err


async def test_a_refused_message_is_forgotten_and_ends_a_pipe_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ParrotEngine(turns_max=1)
    assert await talk(a_chat(engine), "one", "two", "/reset", "three") == 1
    assert contents(engine.seen[2]) == ["user: three"]
    assert "too long" in capsys.readouterr().err


async def test_an_interrupt_ends_the_answer_and_nothing_else() -> None:
    engine = ParrotEngine()
    engine.gate = asyncio.Event()
    chat = a_chat(engine, interactive=True)

    async with asyncio.TaskGroup() as group:
        talking = group.create_task(talk(chat, "a b c", "d"))
        await engine.first_word_said.wait()
        chat.interrupt()
        # The second answer must run to its end, so the gate opens only after the first was left.
        await engine.answer_left.wait()
        engine.gate.set()
    assert talking.result() == 0
    assert engine.left_early == 1
    assert contents(engine.seen[1]) == ["user: a b c", "assistant: a ", "user: d"]


def test_sampling_flags_have_the_limits_of_the_request_parameters() -> None:
    with pytest.raises(ConfigurationError) as refused:
        SamplingArgs(temperature=3, top_p=0, stop=("",), max_tokens=0)
    assert len(refused.value.violations) == 4
    assert {violation.partition(":")[0] for violation in refused.value.violations} == {
        "--temperature",
        "--top-p",
        "--stop",
        "--max-tokens",
    }
    with pytest.raises(ConfigurationError, match="min_tokens is 5; allowed: 0 to max_tokens, which is 4"):
        SamplingArgs(min_tokens=5, max_tokens=4)


def test_only_given_sampling_flags_replace_the_models_defaults() -> None:
    assert SamplingArgs(temperature=0, stop=("x",), ignore_eos=True).given() == {
        "temperature": 0,
        "stop": ("x",),
        "ignore_eos": True,
    }
    assert SamplingArgs().given() == {}
    assert ChatArgs().system is None
