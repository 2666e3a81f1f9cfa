"""What each token stands for in bytes, from how the tokenizer's own decoder would read it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import UnsupportedModelError

SPACE_MARK: Final = "\u2581"
"""SentencePiece writes a space as this character."""
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> Mapping[str, int]:
    """The printable characters that byte-level BPE (GPT-2) writes bytes as."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET: Final = byte_level_alphabet()

LeadingSpace = Literal["kept", "one dropped", "dropped from first token"]
"""What becomes of the space that a tokenizer wrote before the first word of a whole text."""


@dataclass(frozen=True, slots=True)
class PieceReading:
    """How entries of a vocabulary become bytes."""

    byte_level: bool
    space_mark: str = SPACE_MARK
    byte_fallback: bool = False
    leading_space: LeadingSpace = "kept"

    def bytes_of(self, piece: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_ALPHABET[character] for character in piece])
            except KeyError:
                return piece.encode()
        match = _BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else piece.replace(self.space_mark, " ").encode()

    def bytes_of_first(self, piece: str) -> bytes:
        """The piece at the very beginning of a whole text."""
        match self.leading_space:
            case "dropped from first token":
                return self.bytes_of(piece.replace(self.space_mark, ""))
            case "one dropped":
                return self.bytes_of(piece).removeprefix(b" ")
        return self.bytes_of(piece)


def piece_reading(library: LibraryTokenizer) -> PieceReading:
    """Raises UnsupportedModelError for a decoder that is neither byte-level nor SentencePiece-like."""
    decoder: Mapping[str, Any] | None = json.loads(library.to_str())["decoder"] if library.decoder else None
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return PieceReading(byte_level=True)
    reading = _sentence_piece_reading(steps, kinds)
    if reading is None:
        raise UnsupportedModelError(f"no detokenizer for a tokenizer with the decoder {' + '.join(kinds) or 'none'}")
    return reading


def _sentence_piece_reading(steps: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> PieceReading | None:
    """None where the steps are not what SentencePiece's conversions write."""
    fallback = "ByteFallback" in kinds
    rest = [step for step in steps if step["type"] not in ("ByteFallback", "Fuse")]
    match rest:
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:
            leading: LeadingSpace = "kept" if scheme == "never" else "dropped from first token"
            return PieceReading(False, space_mark=mark, byte_fallback=fallback, leading_space=leading)
        case [{"type": "Replace", "pattern": {"String": mark}, "content": " "}]:
            return PieceReading(False, space_mark=mark, byte_fallback=fallback)
        case [
            {"type": "Replace", "pattern": {"String": mark}, "content": " "},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ] if "Fuse" in kinds:
            return PieceReading(False, space_mark=mark, byte_fallback=fallback, leading_space="one dropped")
    return None
