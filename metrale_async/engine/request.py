"""One request inside the engine: its choices, and how their tokens become text."""

from __future__ import annotations

from collections.abc import Sequence

from metrale_async.engine.channel import DeltaChannel
from metrale_async.engine.outputs import FinishReason, Usage
from metrale_async.engine.sampling_params import SamplingParams
from metrale_async.engine.sequence import Sequence as EngineSequence
from metrale_async.execution import Chunk, ChunkResult, TokenLogprobs
from metrale_async.text import IncrementalDetokenizer, StopMatcher, Tokenizer


class Choice:
    """One of a request's n answers: its sequence, and how its tokens become text."""

    def __init__(self, index: int, sequence: EngineSequence, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.index = index
        self.sequence = sequence
        self.last_token_at_s: float | None = None
        self.finish_reason: str | None = None
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def advance(
        self, token_id: int, *, ended: bool, end_token_id: int | None
    ) -> tuple[str, FinishReason | None, str | int | None]:
        """Take one token; returns the text it makes public, and why the choice ends if it does."""
        shows_token = end_token_id is None or self._params.include_stop_str_in_output
        text = self._detokenizer.push(token_id) if shows_token else ""
        if ended:
            text += self._detokenizer.flush()
        if self._stop is not None and len(self.sequence.output_token_ids) >= self._params.min_tokens:
            result = self._stop.push(text)
            if result.matched is not None:
                return result.text_to_emit, "stop", result.matched
            text = result.text_to_emit
            if ended:
                text += self._stop.flush()
        if not ended:
            return text, None, None
        if end_token_id is None:
            return text, "length", None
        return text, "stop", end_token_id if end_token_id in self._params.stop_token_ids else None

    def rest(self) -> str:
        """The text still held back, when the choice ends without another token."""
        text = self._detokenizer.flush()
        if self._stop is None:
            return text
        result = self._stop.push(text)
        return result.text_to_emit + ("" if result.matched is not None else self._stop.flush())


class Request:
    """An accepted request and everything it is made of. Only the step loop changes it."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        channel: DeltaChannel,
        choices: Sequence[Choice],
        params: SamplingParams,
        arrived_at_s: float,
        deadline_s: float,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.channel = channel
        self.choices = choices
        self.params = params
        self.arrived_at_s = arrived_at_s
        self.deadline_s = deadline_s
        self.first_token_at_s: float | None = None
        self.ended = False
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_token_ids)
        self._prompt_logprobs_sent = False

    @property
    def unfinished_choices(self) -> int:
        return sum(choice.finish_reason is None for choice in self.choices)

    @property
    def usage(self) -> Usage:
        completion = sum(len(choice.sequence.output_token_ids) for choice in self.choices)
        return Usage(len(self.prompt_token_ids), completion, self.choices[0].sequence.cached_tokens)

    def take_prompt_logprobs(self, chunk: Chunk, result: ChunkResult) -> None:
        """Keep a chunk's prompt log-probabilities by position, so that a chunk computed twice counts once."""
        if self._prompt_logprobs is not None and result.prompt_logprobs:
            first = chunk.start + 1
            self._prompt_logprobs[first : first + len(result.prompt_logprobs)] = result.prompt_logprobs

    def pop_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """The whole prompt's log-probabilities, once: they travel on the request's first delta."""
        if self._prompt_logprobs is None or self._prompt_logprobs_sent:
            return None
        self._prompt_logprobs_sent = True
        return tuple(self._prompt_logprobs)
