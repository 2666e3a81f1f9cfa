"""A tokenizer from the metadata of a GGUF file, built with the same library that reads ``tokenizer.json``.

``tokenizer.ggml.model`` says the kind: ``gpt2`` is byte-level BPE, whose way of cutting text into words is named by
``tokenizer.ggml.pre``; ``llama`` is SentencePiece BPE with scores and byte fallback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.text.byte_table import SPACE_MARK
from metrale_async.text.pre_tokenizers import WORDS_BY_PRE

# ``tokenizer.ggml.token_type``
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_SPECIAL_KEYS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE_KEY: Final = "tokenizer.chat_template"


def library_tokenizer(metadata: Mapping[str, Any]) -> LibraryTokenizer:
    """Build the tokenizer. Raises UnsupportedModelError or CheckpointError naming the metadata key."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens holds a token twice")
    types = _types(metadata, len(tokens))
    if kind == "gpt2":
        library, begins_with_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        library, begins_with_bos = _sentence_piece(metadata, tokens, types), True
    else:
        raise UnsupportedModelError(f"tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    library.add_tokens(
        [
            AddedToken(token, special=token_type != _USER_DEFINED, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )
    special = special_tokens(metadata)
    first = special.get("bos_token") if _flag(metadata, "add_bos_token", begins_with_bos) else None
    last = special.get("eos_token") if _flag(metadata, "add_eos_token", False) else None
    if first or last:
        _set_ends(library, first, last)
    return library


def special_tokens(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Texts of the tokens a chat template may name. Raises CheckpointError for an id outside the vocabulary."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    found = {}
    for name, key in _SPECIAL_KEYS.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key}_token_id is {index!r}; the vocabulary has {len(tokens)} tokens"
            )
        found[name] = tokens[index]
    return found


def chat_templates(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Templates by name; the one without a name is ``default``."""
    found = {}
    for key, value in metadata.items():
        if key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}."):
            if not isinstance(value, str):
                raise CheckpointError(f"{key} is not text")
            found[key.removeprefix(_TEMPLATE_KEY).removeprefix(".") or "default"] = value
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[LibraryTokenizer, bool]:
    # Files from before the key existed are read as llama.cpp reads them.
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in WORDS_BY_PRE:
        raise UnsupportedModelError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(WORDS_BY_PRE))}")
    words = WORDS_BY_PRE[pre]
    merges = []
    for merge in _list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.whole_words_first)
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise CheckpointError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error
    library = LibraryTokenizer(model)
    if words.nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = words.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library, words.begins_with_bos


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> LibraryTokenizer:
    scores = _list(metadata, "tokenizer.ggml.scores", int | float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries, tokenizer.ggml.tokens {len(tokens)}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = {
        token: score
        for token, score, token_type in zip(tokens, scores, types, strict=True)
        if token_type in (_NORMAL, _UNUSED)
    }
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary, merges=_merges(pieces, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    library = LibraryTokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    stripping: list[decoders.Decoder] = []
    if _flag(metadata, "add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        stripping = [decoders.Strip(" ", 1, 0)]
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *stripping]
    )
    return library


def _merges(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose joined piece scores highest, the leftmost of equals. As a list that
    is every way to make each piece of two, best piece first; of one piece's ways the longest left part first, in which
    order the conversions to ``tokenizer.json`` write them, too."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, -cut, vocabulary[piece], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _set_ends(library: LibraryTokenizer, first: str | None, last: str | None) -> None:
    """The tokens that encoding with special tokens puts before and after the text. Raises CheckpointError."""
    before, after = [text for text in (first,) if text], [text for text in (last,) if text]
    single = [*before, "$A", *after]
    known = [(text, library.token_to_id(text)) for text in dict.fromkeys(before + after)]
    try:
        library.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, *before, "$B:1", *after], special_tokens=known
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{first!r} or {last!r} cannot be put around a text: {error}") from error


def _types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [_NORMAL] * count
    types = _list(metadata, "tokenizer.ggml.token_type", int)
    if len(types) != count:
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {count}")
    return types


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, not true or false")
    return value


def _list(metadata: Mapping[str, Any], key: str, item: Any) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
        raise CheckpointError(f"the GGUF metadata lacks the list {key}")
    return values
