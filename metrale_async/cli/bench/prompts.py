"""Prompts of a wanted number of tokens, for a tokenizer that is only known through the counts a server reports."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

_WORD_LIST: Final = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face level
office door health person art war history party result change morning reason research girl guy
moment air teacher force education
"""

WORDS: Final = tuple(_WORD_LIST.split())
"""Common nouns: a single token each in practically every vocabulary trained on English."""

_CALIBRATION_TRIES_MAX: Final = 8


def word_prompt(words: int, seed: int) -> str:
    """``words`` words drawn with ``seed``: prompts of different seeds share no prefix worth caching."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


async def calibrate_words(
    wanted_tokens: int, count_tokens: Callable[[str], Awaitable[int | None]], seed: int
) -> tuple[int, int | None]:
    """How many words make ``wanted_tokens`` tokens, and how many tokens they made in the last try.

    ``count_tokens`` asks the server, and gives None if it reports no counts; the words are then taken for tokens.
    """
    words = wanted_tokens
    tokens: int | None = None
    for _ in range(_CALIBRATION_TRIES_MAX):
        tokens = await count_tokens(word_prompt(words, seed))
        if tokens is None or tokens == wanted_tokens:
            break
        words = max(1, words + wanted_tokens - tokens)
    return words, tokens
