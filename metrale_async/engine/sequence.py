"""One sequence: what the scheduler knows of one choice of one request."""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from metrale_async.execution.plan import SamplerSpec


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """In the queue: not started, or preempted."""
    RUNNING = "running"
    """Holds a slot and blocks."""
    FINISHED = "finished"
    """Holds nothing, and never will again."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one sequence. Only the scheduler writes to it."""

    sequence_id: int
    """Rises with arrival; the order in which sequences are admitted and the reverse of that in which they are
    preempted."""
    prompt_token_ids: SequenceOf[int]
    max_new_tokens: int
    sampler: SamplerSpec
    end_token_ids: frozenset[int]
    """Tokens that end the sequence: end-of-sequence unless ignored, and stop_token_ids."""
    min_tokens: int
    leader: Sequence | None = None
    """The request's first choice, for its other choices: they share the blocks of the prompt it computed."""

    hash_root: bytes = b""
    """Where the names of its blocks start (cache/block_hash.py)."""
    reads_prefix_cache: bool = True
    """Whether cached rows may stand in for computing them; not for a prompt whose log-probabilities are asked for."""

    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    """Tokens whose keys and values exist once every planned step has run."""
    samples_in_flight: int = 0
    """Planned steps that will give this sequence a token which is not known yet."""
    hashes: list[bytes] = field(default_factory=list)
    """Names of its full blocks, as far as they were needed."""
    table_updates: list[tuple[int, int]] = field(default_factory=list)
    """(index, block): its own blocks replaced by cached ones with the same rows, as the next chunk will tell."""
    published_blocks: int = 0
    """Blocks of the current run that the prefix cache was told of."""
    snapshot_positions: list[int] = field(default_factory=list)
    """Numbers of tokens after which its recurrent states are to be kept."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed when it was first admitted."""
    preemptions: int = 0
    first_planned_at_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and committed output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def planned_tokens(self) -> int:
        """Known tokens and those that planned steps will add."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.samples_in_flight

    @property
    def uncomputed_tokens(self) -> int:
        return self.planned_tokens - self.computed_tokens

    @property
    def wants_no_more_tokens(self) -> bool:
        """Whatever the tokens in flight turn out to be, the sequence ends with them at the latest."""
        return len(self.output_token_ids) + self.samples_in_flight >= self.max_new_tokens
