"""Finds stop strings in a text that arrives in pieces, and holds back only what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What one piece of text made public, and the stop string that ended the text, if one did."""

    text_to_emit: str
    matched: str | None = None


class StopMatcher:
    """The text ends at the stop string whose last character comes first; of several that end there, at the longest one.

    That is the decision a reader of the text can make earliest, so it does not depend on how the text is cut into
    pieces. No part of a stop string is emitted before it is clear that it is none; what is held back at any time is the
    longest end of the text that begins a stop string, and nothing more. After a match nothing more is accepted.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if not stop_strings or not all(stop_strings):
            raise ValueError("stop strings must not be empty")
        # Longest first, so that the first one found to end at a position is the one to report.
        self._stops = sorted(set(stop_strings), key=lambda stop: (-len(stop), stop))
        self._longest = len(self._stops[0])
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop_str_in_output
        self._held = ""
        self._matched = False

    def push(self, text: str) -> StopResult:
        """Take the next piece."""
        assert not self._matched, "the text has ended"
        if not self._held and self._first_characters.isdisjoint(text):
            return StopResult(text)
        known = len(self._held)
        text = self._held + text
        match = self._first_match(text, known)
        if match is not None:
            stop, end = match
            self._matched = True
            self._held = ""
            return StopResult(text[: end if self._include else end - len(stop)], stop)
        start = self._start_of_possible_stop(text)
        self._held = text[start:]
        return StopResult(text[:start])

    def flush(self) -> str:
        """The text ends without a stop string: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, known: int) -> tuple[str, int] | None:
        """The stop string that ends first in ``text``, and its end. None ends within the first ``known`` characters."""
        best: tuple[str, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = (stop, start + len(stop))
        return best

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest end of ``text`` that begins a stop string starts.

        A position that fails is emitted and never looked at again, so over a whole text this takes one comparison per
        character and stop string, besides the one per piece that succeeds.
        """
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                end = text[start:]
                if any(stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
