"""How the byte-level vocabularies of GGUF files cut text into words before merging, by ``tokenizer.ggml.pre``.

The names are llama.cpp's. Where the model's own ``tokenizer.json`` says more than that name does in llama.cpp (NFC
before anything else, single digits), this follows ``tokenizer.json``: that is what the model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers

GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS: Final = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS: Final = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(contractions: str, digits: str) -> str:
    """Words are also cut where lower case turns into upper case."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DEEPSEEK_CJK: Final = "[一-龥ࠀ-一가-퟿]+"
# Cased letters, as the model lists them; escaped, since Unicode normalisation would change some of them.
_DEEPSEEK_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK3_WORDS: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class BytePairWords:
    """What one value of ``tokenizer.ggml.pre`` means."""

    patterns: tuple[str, ...]
    """Applied one after the other, each to the pieces that the ones before it left."""
    nfc: bool = False
    """Text is brought to Unicode's composed form first."""
    whole_words_first: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    begins_with_bos: bool = False
    """Unless ``tokenizer.ggml.add_bos_token`` says otherwise."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
        )


_GPT2: Final = BytePairWords((GPT2_WORDS,))
_SINGLE_DIGITS: Final = BytePairWords((r"\p{N}", GPT2_WORDS))
_LLAMA3: Final = BytePairWords((_LLAMA3_WORDS,), whole_words_first=True, begins_with_bos=True)
_QWEN2: Final = BytePairWords((_QWEN2_WORDS,), nfc=True)

WORDS_BY_PRE: Final[Mapping[str, BytePairWords]] = {
    "default": BytePairWords((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), BytePairWords((_LLAMA3_WORDS,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": BytePairWords((_QWEN35_WORDS,), nfc=True),
    "tekken": BytePairWords((_cased_words("", r"\p{N}"),), whole_words_first=True, begins_with_bos=True),
    "gpt-4o": BytePairWords((_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "falcon": BytePairWords((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-llm": BytePairWords(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": BytePairWords((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": BytePairWords((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)),  # noqa: RUF001
}
