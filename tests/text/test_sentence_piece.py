"""SentencePiece vocabularies from GGUF files, against a plain spelling-out of the algorithm and against the library."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_async.errors import CheckpointError
from metrale_async.models.gguf_file import GgufFile
from metrale_async.text import Tokenizer
from metrale_async.text.gguf_tokenizer import library_tokenizer
from tests.text.awkward_strings import AWKWARD_STRINGS

MARK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = ["the cat sat on the mat", "the dog and the cat ran", "a rat sat; a bat ran", "über größe", "日本 日本語"]


def train(corpus: list[str], size: int) -> list[str]:
    """The pieces of a byte-pair encoding, in the order of their merges, then the characters."""
    words = [[*f"{MARK}{word}"] for line in corpus for word in line.split()]
    pieces: list[str] = []
    while len(pieces) < size:
        counts: dict[str, int] = {}
        for word in words:
            for left, right in pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        pieces.append(best)
        words = [merge_all(word, best) for word in words]
    return [*pieces, *sorted({character for line in corpus for character in line if character != " "} | {MARK})]


def merge_all(word: list[str], piece: str) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and merged[-1] + symbol == piece:
            merged[-1] = piece
        else:
            merged.append(symbol)
    return merged


PIECES = train(CORPUS, 60)
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
SCORES = {piece: -float(index) for index, piece in enumerate(PIECES)}


def specification(text: str, *, add_space_prefix: bool = True) -> list[int]:
    """Join the neighbours whose joined piece has the best score, the leftmost of equals, while there are any."""
    if not text:
        return []
    symbols = [*(MARK * add_space_prefix + text).replace(" ", MARK)]
    while True:
        scores = [SCORES.get(left + right, -math.inf) for left, right in pairwise(symbols)]
        if not scores or max(scores) == -math.inf:
            break
        place = scores.index(max(scores))
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [TOKENS.index(symbol)] if symbol in SCORES else [3 + byte for byte in symbol.encode()]
    return ids


def write_gguf(path: Path, **flags: bool) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 259 + [SCORES[piece] for piece in PIECES])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(PIECES)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("sentence-piece") / "m.gguf")
    return Tokenizer.from_gguf_metadata(GgufFile(path).metadata)


@given(st.text(alphabet=[*"the cat rn<>", "ü", "日", "本", "😀", "\t", "\n"], max_size=40))
def test_tokens_are_those_of_the_specification(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == specification(text)
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
    assert tokenizer.decode([1, *ids]) == text


def test_awkward_strings_are_those_of_the_specification(tokenizer: Tokenizer) -> None:
    for text in AWKWARD_STRINGS:
        if not any(special in text for special in TOKENS[:3]):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == specification(text), repr(text)
            # Spaces are written as the mark, so a mark in the text comes back as a space.
            assert tokenizer.decode(ids) == text.replace(MARK, " "), repr(text)


def test_special_tokens_as_text_are_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == {0, 1, 2}
    for index, text in enumerate(TOKENS[:3]):
        assert tokenizer.encode(text, add_special_tokens=False) == [index]
        plain = tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=False)
        assert plain == specification(text)
    # The text of a byte token is ordinary text.
    assert tokenizer.encode("<0x41>", add_special_tokens=False) == specification("<0x41>")


def test_the_files_flags_say_what_is_added(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    tokenizer = Tokenizer.from_gguf_metadata(GgufFile(path).metadata)
    for text in ("the cat", " the cat", "  日本"):
        ids = specification(text, add_space_prefix=False)
        assert tokenizer.encode(text, add_special_tokens=True) == [*ids, 2]
        assert tokenizer.decode(ids) == text


def test_scores_of_another_length_are_refused() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [0.0]}
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores has 1 entries"):
        library_tokenizer(metadata)


def test_a_vocabulary_that_sentencepiece_trained_gives_its_tokens(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    texts = [text for text in AWKWARD_STRINGS if text.strip() and "\n" not in text and "<" not in text]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS * 20, *texts]),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    count = theirs.vocab_size()
    kinds = [(theirs.is_unknown, 2), (theirs.is_control, 3), (theirs.is_byte, 6), (theirs.is_unused, 5)]
    tokenizer = Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [theirs.id_to_piece(index) for index in range(count)],
            "tokenizer.ggml.scores": [theirs.get_score(index) for index in range(count)],
            "tokenizer.ggml.token_type": [
                next((number for test, number in kinds if test(index)), 1) for index in range(count)
            ],
            "tokenizer.ggml.bos_token_id": theirs.bos_id(),
            "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        }
    )
    for text in [*AWKWARD_STRINGS, *CORPUS]:
        if text and not any(special in text for special in ("<unk>", "<s>", "</s>")):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == theirs.encode(text), repr(text)
            assert tokenizer.decode(ids) == theirs.decode(ids), repr(text)
