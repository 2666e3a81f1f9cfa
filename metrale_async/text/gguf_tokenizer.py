"""A tokenizer from the metadata of a GGUF file, built with the same library that reads ``tokenizer.json``.

``tokenizer.ggml.model`` says the kind: ``gpt2`` is byte-level BPE, whose way of cutting text into words is named by
``tokenizer.ggml.pre``; ``llama`` is SentencePiece BPE with scores and byte fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.text.byte_table import SPACE_MARK

# ``tokenizer.ggml.token_type``
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS: Final = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(words: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "olmo": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3_WORDS),
    "llama3": lambda: _split(_LLAMA3_WORDS),
    "llama-v3": lambda: _split(_LLAMA3_WORDS),
    "qwen2": lambda: _split(_QWEN2_WORDS),
    "deepseek-r1-qwen": lambda: _split(_QWEN2_WORDS),
    "tekken": lambda: _split(_TEKKEN_WORDS),
}
_WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A word that is in the vocabulary is one token, whatever the merges say."""
_BEGINS_WITH_BOS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def library_tokenizer(metadata: Mapping[str, Any]) -> LibraryTokenizer:
    """Build the tokenizer. Raises UnsupportedModelError or CheckpointError naming the metadata key."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens holds a token twice")
    if kind == "gpt2":
        library, begins_with_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        library, begins_with_bos = _sentence_piece(metadata, tokens)
    else:
        raise UnsupportedModelError(f"tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    types = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=token_type == _CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    library.add_tokens(added)
    _add_ends(library, metadata, tokens, begins_with_bos)
    return library


def special_tokens(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Texts of the tokens a chat template may name."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[index] for name, index in found.items() if isinstance(index, int) and 0 <= index < len(tokens)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[LibraryTokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(sorted(_PRE_TOKENIZERS))}")
    merges = []
    for merge in _list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise CheckpointError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error
    library = LibraryTokenizer(model)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    library.decoder = decoders.ByteLevel()
    return library, pre in _BEGINS_WITH_BOS


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[LibraryTokenizer, bool]:
    scores = _list(metadata, "tokenizer.ggml.scores", int | float)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not len(scores) == len(types) == len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens, scores and token_type have different lengths")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    normal = {
        token: score
        for token, score, token_type in zip(tokens, scores, types, strict=True)
        if token_type not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)
    }
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocabulary, merges=_merges(normal, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    library = LibraryTokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    stripping: list[decoders.Decoder] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
        stripping = [decoders.Strip(" ", 1, 0)]
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *stripping]
    )
    return library, True


def _merges(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose joined piece scores highest; as a list of merges that is every way
    to make each piece of two, best piece first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for *_, left, right in found]


def _add_ends(
    library: LibraryTokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], begins_with_bos: bool
) -> None:
    """The BOS and EOS tokens that encoding with special tokens adds."""
    first: list[str] = []
    last: list[str] = []
    for key, default, name, place in (
        ("add_bos_token", begins_with_bos, "bos", first),
        ("add_eos_token", False, "eos", last),
    ):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.{key}", default) and isinstance(index, int) and 0 <= index < len(tokens):
            place.append(tokens[index])
    if first or last:
        ids = [(token, tokens.index(token)) for token in dict.fromkeys(first + last)]
        template = [*first, "$A", *last]
        pair = [*template, *first, "$B:1", *last]
        library.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=ids)


def _list(metadata: Mapping[str, Any], key: str, item: Any) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
        raise CheckpointError(f"the GGUF metadata lacks the list {key}")
    return values
