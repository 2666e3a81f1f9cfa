"""How many prompt tokens a step may hold so that running streams keep their pace."""

from __future__ import annotations

from typing import Final

TARGET_STEP_S: Final = 0.100
"""The longest time between two tokens of a running stream that prefill of others may cause."""
SAFETY: Final = 0.85
"""Share of the target that is planned for; the rest is for what the estimate does not see."""
MIN_TOKENS: Final = 16
"""Below this a prompt would never finish; one such chunk costs about what one row costs."""
MAX_TOKENS: Final = 2048
"""The largest chunk, also when no stream runs: a new arrival waits for one chunk at most."""
SMOOTHING: Final = 0.3


class PrefillBudget:
    """Chunk size from measured step times; or a fixed one.

    A step with prompt rows is modelled as ``base + prompt tokens * seconds per token``, where the base is what a step
    without prompt rows took lately. Answers do not depend on chunk sizes, so nothing but pace hangs on this estimate.
    """

    def __init__(self, fixed_tokens: int | None) -> None:
        self._fixed_tokens = fixed_tokens
        self._decode_step_s = 0.0
        self._prefill_token_s: float | None = None

    def tokens(self, *, streams_are_running: bool) -> int:
        """The most prompt tokens the next step may hold."""
        if self._fixed_tokens is not None:
            return self._fixed_tokens
        if not streams_are_running:
            return MAX_TOKENS
        if self._prefill_token_s is None:
            return MIN_TOKENS * 4
        room_s = TARGET_STEP_S * SAFETY - self._decode_step_s
        fitting = int(room_s / self._prefill_token_s) if self._prefill_token_s > 0 else MAX_TOKENS
        return max(MIN_TOKENS, min(MAX_TOKENS, fitting - fitting % MIN_TOKENS))

    def observe(self, *, duration_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        """Learn from one finished step."""
        if prefill_tokens == 0:
            if decode_tokens:
                self._decode_step_s += SMOOTHING * (duration_s - self._decode_step_s)
            return
        # A tiny chunk says little about the cost of a token: its step is nearly all base.
        if prefill_tokens < MIN_TOKENS:
            return
        base_s = self._decode_step_s if decode_tokens else 0.0
        token_s = max(0.0, duration_s - base_s) / prefill_tokens
        if self._prefill_token_s is None:
            self._prefill_token_s = token_s
        else:
            self._prefill_token_s += SMOOTHING * (token_s - self._prefill_token_s)
