"""Text to token ids and back, on top of the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import anyio.to_thread
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import CheckpointError, InvalidRequestError
from metrale_async.text import gguf_tokenizer
from metrale_async.text.byte_table import bytes_of_piece
from metrale_async.text.chat_template import ChatTemplate, Message
from metrale_async.text.detokenizer import IncrementalDetokenizer

MAX_INLINE_CHARS: Final = 2048
"""Longer texts are encoded on a worker thread (the library releases the interpreter lock): the loop is never held."""

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer and chat template. Reading is thread-safe."""

    def __init__(self, library: LibraryTokenizer, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token`` ... to their text."""
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._special_tokens = dict(special_tokens)
        self._piece_bytes, self._drops_leading_space = bytes_of_piece(library)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(
            index for index, token in library.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        end = self._special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if end is None else (end,)
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """A Hugging Face directory: tokenizer.json, and tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja where they exist. Raises CheckpointError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{directory.name} holds no tokenizer.json")
        try:
            library = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for anything it cannot read
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        config = _read_object(directory / "tokenizer_config.json")
        named = {**_read_object(directory / "special_tokens_map.json"), **config}
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(named.get(name))) is not None}
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"))
        return cls(library, special, template)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The ``tokenizer.*`` keys of a GGUF file. Raises CheckpointError or UnsupportedModelError."""
        library = gguf_tokenizer.library_tokenizer(metadata)
        template = metadata.get("tokenizer.chat_template")
        return cls(library, gguf_tokenizer.special_tokens(metadata), template if isinstance(template, str) else None)

    # Text to tokens

    def encode(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens`` puts BOS (and EOS) where the model expects them; without
        ``parse_special_tokens`` the text of a special token is ordinary text.

        Raises InvalidRequestError for text that is not Unicode (lone surrogates).
        """
        library = self._library if parse_special_tokens else self._plain_library
        try:
            ids: list[int] = library.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
        return ids

    async def encode_async(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool = True
    ) -> list[int]:
        """:meth:`encode`, on a worker thread if the text is long."""
        if len(text) <= MAX_INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens)
        return await anyio.to_thread.run_sync(
            lambda: self.encode(text, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens)
        )

    async def encode_chat_async(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Render messages with the model's template and encode the result, on a worker thread. Templates write BOS
        themselves, so it is not added again. Raises InvalidRequestError, also when the model has no template."""
        template = self.chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions, or a model with a template", param="messages"
            )

        def work() -> list[int]:
            text = template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
            return self.encode(text, add_special_tokens=add_special_tokens)

        return await anyio.to_thread.run_sync(work)

    # Tokens to text

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        return text.removeprefix(" ") if self._drops_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; they may be part of a character. Empty for ids the tokenizer has no text
        for."""
        return self.bytes_to_decode(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token; bytes that are no whole character read U+FFFD."""
        return self.bytes_to_decode(token_id).decode(errors="replace")

    def bytes_to_decode(self, token_id: int) -> bytes:
        """:meth:`token_bytes`, by table: on the path of every generated token."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._library.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = b"" if piece is None else self._piece_bytes(piece)
        return known

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines tokenization."""
        return hashlib.sha256(self._library.to_str().encode()).hexdigest()

    @cached_property
    def _plain_library(self) -> LibraryTokenizer:
        plain = LibraryTokenizer.from_str(self._library.to_str())
        plain.encode_special_tokens = True
        return plain

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        if text is None:
            return None
        index = self._library.token_to_id(text)
        if index is None:
            raise CheckpointError(f"{name} is {text!r}, which the tokenizer does not have")
        return int(index)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A special token as configs write it: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: Any) -> str | None:
    """One template, or a list of named ones of which ``default`` is meant."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
