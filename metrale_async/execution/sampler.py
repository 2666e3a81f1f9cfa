"""From logits to a token: a function of the row, the sequence's own history and its own random number, of nothing else.

Every sampled row is computed on its own, as a vector of one fixed length, so its bits cannot depend on its neighbours.
Filters are expressed as thresholds on values, which keeps all tokens that tie with the last one kept and needs no
order among equal values.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from metrale_async.execution.plan import SamplerSpec, TokenLogprobs

TOP_P_FIRST_CANDIDATES = 512
"""Candidates that are sorted before the whole vocabulary is: nearly always they hold the wanted mass."""


def uniform(spec: SamplerSpec, position: int) -> float:
    """The random number in [0, 1) of the token at ``position``: counter-based, so that it can be drawn again after a
    preemption, in any order and on any rank."""
    counter = struct.pack("<QQQ", spec.seed, spec.choice, position)
    (bits,) = struct.unpack("<Q", hashlib.blake2b(counter, digest_size=8, person=b"metrale-sample").digest())
    return float(bits >> 11) * 2.0**-53


class TokenHistory:
    """What penalties need to know of a sequence: which tokens its prompt holds and how often each was generated.

    Counts are int32 [vocab_size] on the device of the logits, held only for sequences with penalties.
    """

    def __init__(self, token_ids: Tensor, prompt_length: int, vocab_size: int) -> None:
        """token_ids int64 [n]: prompt, then generated tokens."""
        device = token_ids.device
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt[token_ids[:prompt_length]] = True
        self.generated = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        generated = token_ids[prompt_length:]
        self.generated.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def add(self, token_id: Tensor) -> None:
        """token_id int64 scalar."""
        self.generated[token_id] += 1


def edit_logits(logits: Tensor, spec: SamplerSpec, history: TokenHistory | None, generated_tokens: int) -> Tensor:
    """float32 [V] -> float32 [V]: bias, penalties and the ban on ending early. The input is left as it is."""
    if not spec.edits_logits:
        return logits
    logits = logits.clone()
    if spec.logit_bias:
        ids = torch.tensor(list(spec.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(spec.logit_bias.values()), dtype=torch.float32, device=logits.device)
    if history is not None:
        if spec.repetition_penalty != 1.0:
            seen = history.prompt | (history.generated > 0)
            scaled = torch.where(logits > 0, logits / spec.repetition_penalty, logits * spec.repetition_penalty)
            logits = torch.where(seen, scaled, logits)
        if spec.frequency_penalty != 0.0:
            logits = logits - spec.frequency_penalty * history.generated
        if spec.presence_penalty != 0.0:
            logits = logits - spec.presence_penalty * (history.generated > 0)
    if generated_tokens < spec.min_tokens and spec.suppressed_token_ids:
        logits[list(spec.suppressed_token_ids)] = float("-inf")
    return logits


def sample_row(logits: Tensor, spec: SamplerSpec, random: float) -> Tensor:
    """float32 [V] (edited) -> int64 scalar. ``random`` in [0, 1) picks from the filtered distribution by its
    cumulative sum in vocabulary order."""
    if spec.temperature == 0.0 or spec.top_k == 1:
        return logits.argmax()
    logits = logits / spec.temperature
    vocab_size = logits.shape[0]
    if 0 < spec.top_k < vocab_size:
        threshold = torch.topk(logits, spec.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    if spec.top_p < 1.0:
        threshold = _top_p_threshold(probabilities, spec.top_p)
        probabilities = probabilities.masked_fill(probabilities < threshold, 0.0)
    if spec.min_p > 0.0:
        probabilities = probabilities.masked_fill(probabilities < spec.min_p * probabilities.max(), 0.0)
    cumulative = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
    # searchsorted(right=True) is the first index whose cumulative sum exceeds the target, so a token of probability 0
    # is never taken; rounding can push the target onto the total, hence the clamp to the last possible token.
    target = cumulative[-1] * random
    index = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[-1], right=False)
    return torch.minimum(index, last)


def _top_p_threshold(probabilities: Tensor, top_p: float) -> Tensor:
    """The probability of the last token in the smallest set of most likely tokens whose mass reaches ``top_p``."""
    candidates = min(TOP_P_FIRST_CANDIDATES, probabilities.shape[0])
    values = torch.topk(probabilities, candidates).values
    mass = torch.cumsum(values, dim=-1, dtype=torch.float64)
    if float(mass[-1]) < top_p and candidates < probabilities.shape[0]:
        values = torch.sort(probabilities, descending=True).values
        mass = torch.cumsum(values, dim=-1, dtype=torch.float64)
    reached = torch.searchsorted(mass, torch.tensor(top_p, dtype=torch.float64, device=mass.device))
    return values[reached.clamp(max=values.shape[0] - 1)]


def token_logprobs(logits: Tensor, token_id: int, alternatives: int) -> TokenLogprobs:
    """float32 [V] unedited logits -> the chosen token's log-probability and those of the ``alternatives`` likeliest."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = torch.topk(logprobs, min(alternatives, logprobs.shape[0]))
        # Equal values come in the order of their ids.
        top = tuple(sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0])))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
