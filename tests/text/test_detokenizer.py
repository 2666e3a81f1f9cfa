"""Pieces join to the whole, characters stay whole, for every kind of decoder and any sequence of tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import UnsupportedModelError
from metrale_async.text import IncrementalDetokenizer, Tokenizer
from metrale_async.text.byte_table import SPACE_MARK
from tests.support.scripted_engine import byte_tokenizer

TINY_HYBRID = Path(__file__).parent.parent / "data" / "tiny-hybrid"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [*"aé日😀", "ab", SPACE_MARK, SPACE_MARK * 2, f"{SPACE_MARK}a", f"{SPACE_MARK}日", f"b{SPACE_MARK}"]
REPLACE, FALLBACK, FUSE = decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()
DECODERS = {
    "strip": decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Sequence([FALLBACK, decoders.Metaspace(prepend_scheme="never")]),
}
KINDS = ["byte-level", "tiny-hybrid", *DECODERS]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte-level":
        return byte_tokenizer()
    if kind == "tiny-hybrid":
        return Tokenizer.from_directory(TINY_HYBRID)
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", *BYTES, *PIECES])}
    library = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    library.decoder = DECODERS[kind]
    library.add_tokens(
        [AddedToken("<s>", special=True), AddedToken("<tool>", special=False), AddedToken("  ", special=False)]
    )
    return Tokenizer(library, {}, {})


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, and tokens of a text, so that whole characters occur as often as broken ones."""
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    texts = st.text(max_size=12).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return st.lists(st.one_of(anything, texts), max_size=4).map(
        lambda parts: [token for part in parts for token in part]
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_decoded_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(token_ids(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prefix_ids=())
    joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    theirs = tokenizer._library.decode(ids, skip_special_tokens=skip)
    # The library's byte fallback takes a run of byte tokens for no characters at all if one of them is none.
    if "\ufffd" not in joined or kind in ("byte-level", "tiny-hybrid"):
        assert joined == theirs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_a_text_continues_its_prefix(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    prefix, ids = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    whole = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prefix_ids=())
    before = "".join(map(whole.push, prefix))
    continued = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prefix_ids=prefix)
    joined = before + "".join(map(continued.push, ids)) + continued.flush()
    assert joined == tokenizer.decode([*prefix, *ids], skip_special_tokens=skip)


def test_a_character_that_begins_in_the_prefix_is_completed() -> None:
    tokenizer = byte_tokenizer()
    for text in ("é", "日", "😀", "a😀b", "日😀"):
        ids = list(text.encode())
        for cut in range(len(ids) + 1):
            detokenizer = IncrementalDetokenizer(tokenizer, prefix_ids=ids[:cut])
            rest = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush()
            shown_before = len(text.encode()[:cut].decode(errors="ignore"))
            assert rest == text[shown_before:], (text, cut)


@given(st.binary(max_size=40))
def test_an_incomplete_character_is_held_back_and_no_longer(data: bytes) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer())
    shown = ""
    for count, byte in enumerate(data, 1):
        shown += detokenizer.push(byte)
        whole = data[:count].decode(errors="replace")
        assert whole.startswith(shown)
        # What is missing is no character yet, and at most three bytes.
        missing = whole[len(shown) :]
        assert missing in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")
    assert shown + detokenizer.flush() == data.decode(errors="replace")


def test_a_first_space_is_dropped_only_where_the_text_begins() -> None:
    tokenizer = tokenizer_of("strip")
    start, word = (tokenizer._library.token_to_id(piece) for piece in ("<s>", f"{SPACE_MARK}a"))

    def shown(prefix_ids: list[int] | None) -> str:
        return IncrementalDetokenizer(tokenizer, prefix_ids=prefix_ids).push(word)

    assert (shown(None), shown([]), shown([start]), shown([word])) == (" a", "a", "a", " a")


def test_an_added_token_stands_for_its_own_text_though_its_characters_are_in_the_byte_alphabet() -> None:
    library = LibraryTokenizer(models.BPE(vocab={"\u0120": 0, "a": 1}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken("<ñ>"), AddedToken("<｜end｜>", special=True)])  # noqa: RUF001
    tokenizer = Tokenizer(library, {}, {})
    assert tokenizer.decode([1, 2, 0, 3], skip_special_tokens=False) == "a<ñ> <｜end｜>"  # noqa: RUF001
    assert tokenizer.token_bytes(2) == "<ñ>".encode()


def test_ids_without_text_are_empty_and_are_not_remembered() -> None:
    tokenizer = byte_tokenizer()
    known = len(tokenizer.bytes_by_id)
    for token_id in (-1, 257, 2**32, 2**70):
        assert tokenizer.token_bytes(token_id) == b""
    assert len(tokenizer.bytes_by_id) == known
    assert tokenizer.decode([97, 5000, 98]) == "ab"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([REPLACE, FUSE, decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Replace("x", "y"), decoders.ByteLevel()]),
    ],
)
def test_a_decoder_that_is_not_understood_is_refused_by_name(decoder: decoders.Decoder | None) -> None:
    library = LibraryTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        library.decoder = decoder
    with pytest.raises(UnsupportedModelError, match="no detokenizer"):
        Tokenizer(library, {}, {})
