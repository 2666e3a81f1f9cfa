"""What the scheduler asks of an executor for one step, and what comes back.

A plan says *which* rows are computed, never their tokens: a token sampled in step n stays on the device in its slot and
is read there by step n + 1, so plan n + 1 can be made while step n runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """How the tokens of one sequence are chosen. Neutral values switch a filter off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    """64-bit seed of the request."""
    choice: int
    """Index among the request's n choices; seed, choice and position together give the random number of a token."""
    logprobs: int | None
    prompt_logprobs: int | None
    min_tokens: int
    suppressed_token_ids: tuple[int, ...]
    """Tokens that would end the sequence, not allowed before ``min_tokens`` tokens were generated."""

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the argmax of the model's own logits."""
        return (self.temperature == 0.0 or self.top_k == 1) and not self.edits_logits

    @property
    def edits_logits(self) -> bool:
        return bool(self.logit_bias) or self.has_penalties or (self.min_tokens > 0 and bool(self.suppressed_token_ids))

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence takes a slot, for the first time or again after preemption; whatever the slot held is forgotten."""

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    """Prompt, then the tokens generated before a preemption."""
    prompt_length: int
    blocks: tuple[int, ...]
    """Blocks whose rows are computed already (or copied now); the block table begins with them."""
    copies: tuple[tuple[int, int], ...]
    """(source, target) blocks to copy whole before this step computes anything: prefixes that end inside one."""
    snapshot: int | None
    """Where the recurrent states after the tokens of ``blocks`` lie; None if it starts at its first token."""
    sampler: SamplerSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in a step: its tokens ``start .. start + count - 1``."""

    slot: int
    sequence_id: int
    start: int
    count: int
    new_blocks: tuple[int, ...]
    """Block ids that extend the slot's block table; with what it held they cover every row of this chunk."""
    samples: bool
    """The last row is the sequence's newest token, so its logits choose the next one."""
    table_updates: tuple[tuple[int, int], ...] = ()
    """(index, block): the slot's block table has these blocks there from now on; they hold the same rows."""
    snapshot: int | None = None
    """Where to copy the recurrent states after the chunk's last row to."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequences that take slots, then the rows to compute."""

    step: int
    starts: tuple[SequenceStart, ...]
    chunks: tuple[Chunk, ...]
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model's own distribution (float32)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one chunk gave. ``error`` is set when its computation failed; then nothing else is."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For the prompt positions ``start + 1 .. start + count`` as far as they are prompt, when asked for."""
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of ``StepPlan.chunks``."""

    chunks: tuple[ChunkResult, ...]
