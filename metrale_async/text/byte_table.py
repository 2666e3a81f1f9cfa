"""What each token stands for in bytes, from how the tokenizer's own decoder would read it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

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


def bytes_of_piece(library: LibraryTokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a vocabulary entry becomes bytes, and whether a leading space of a whole text is dropped.

    Raises UnsupportedModelError for a decoder that is neither byte-level nor SentencePiece-like.
    """
    decoder: Mapping[str, Any] | None = json.loads(library.to_str())["decoder"] if library.decoder else None
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
        strips = "Strip" in kinds or (metaspace is not None and metaspace.get("prepend_scheme", "always") != "never")
        return _sentence_piece_bytes, strips
    raise UnsupportedModelError(f"no detokenizer for a tokenizer with the decoder {' + '.join(kinds) or 'none'}")


_ALPHABET: Final = byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        # An added token whose text is not in the alphabet stands for itself.
        return piece.encode()


def _sentence_piece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(SPACE_MARK, " ").encode()
