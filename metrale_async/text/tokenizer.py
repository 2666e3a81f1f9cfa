"""Text to token ids and back, on top of the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import anyio.to_thread
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import CheckpointError, InvalidRequestError
from metrale_async.text import gguf_tokenizer
from metrale_async.text.byte_table import PieceReading, piece_reading
from metrale_async.text.chat_template import ChatTemplate, Message
from metrale_async.text.control_tokens import broken_up, with_marks_removed
from metrale_async.text.detokenizer import IncrementalDetokenizer
from metrale_async.text.hf_tokenizer import HuggingFaceFiles

MAX_INLINE_CHARS: Final = 2048
"""Longer texts are encoded on a worker thread, where the library releases the interpreter lock."""


class Tokenizer:
    """A model's tokenizer and chat template. Reading is thread-safe."""

    def __init__(
        self, library: LibraryTokenizer, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]
    ) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token`` ... to their text. ``chat_templates``: by name, ``default``
        and ``tool_use`` are known."""
        library = with_marks_removed(library)
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._special_tokens = dict(special_tokens)
        added = library.get_added_tokens_decoder()
        reading = piece_reading(library)
        self._reading = reading
        self.drops_leading_space = reading.leading_space != "kept"
        self.bytes_by_id: Mapping[int, bytes] = _BytesById(
            library, reading, {index: token.content for index, token in added.items()}
        )
        """:meth:`token_bytes` as a table: on the path of every generated token. It has an entry for every integer."""
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        # A token of one character has no inside to put a mark into.
        self._control_texts = tuple(
            token.content for token in added.values() if token.special and len(token.content) > 1
        )
        self.bos_token_id = self._special_id("bos_token")
        end = self._special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if end is None else (end,)
        compiled = {
            name: ChatTemplate(source, special_tokens)
            for name, source in chat_templates.items()
            if name in ("default", "tool_use")
        }
        self.chat_template = compiled.get("default")
        self._tool_use_template = compiled.get("tool_use")

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """A Hugging Face directory: tokenizer.json, and tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja where they exist. Raises CheckpointError."""
        files = HuggingFaceFiles(directory)
        return cls(files.library_tokenizer(), files.special_tokens, files.chat_templates())

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The ``tokenizer.*`` keys of a GGUF file. Raises CheckpointError or UnsupportedModelError."""
        library = gguf_tokenizer.library_tokenizer(metadata)
        return cls(library, gguf_tokenizer.special_tokens(metadata), gguf_tokenizer.chat_templates(metadata))

    # Text to tokens

    def encode(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ``add_special_tokens`` puts BOS (and EOS) where the model expects them; without
        ``parse_special_tokens`` the text of a special token is ordinary text.

        Raises InvalidRequestError for text that is not Unicode (lone surrogates) or holds reserved code points.
        """
        marked = broken_up(text, () if parse_special_tokens else self._control_texts, param="prompt")
        return self._encode(marked, add_special_tokens, "prompt")

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
        """Render messages with the model's template and encode the result, on a worker thread.

        Templates write BOS themselves, so it is not added again. Control tokens come from the template alone: their
        text in messages, tools and variables is ordinary text. Raises InvalidRequestError, also when the model has no
        template.
        """
        template = self._tool_use_template if tools and self._tool_use_template else self.chat_template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions, or a model with a template", param="messages"
            )

        def work() -> list[int]:
            text = template.render(
                broken_up(messages, self._control_texts, param="messages"),
                tools=broken_up(tools, self._control_texts, param="tools"),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=broken_up(variables, self._control_texts, param="chat_template_kwargs"),
            )
            return self._encode(text, add_special_tokens, "messages")

        return await anyio.to_thread.run_sync(work)

    def _encode(self, marked: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            if len(marked) <= MAX_INLINE_CHARS:
                ids: list[int] = self._library.encode(marked, add_special_tokens=add_special_tokens).ids
            else:
                # Encoding one text keeps the interpreter lock from start to end: half a second for a megabyte, in
                # which the loop stands still. Encoding a batch does not. Short texts do not go this way, since a batch
                # waits for the library's thread pool, which others' long texts may be using.
                ids = self._library.encode_batch_fast([marked], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # what the library makes of a str that it cannot turn into UTF-8
            raise InvalidRequestError(
                "the text is not valid Unicode: it holds half of a surrogate pair", param=param
            ) from error
        return ids

    # Tokens to text

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens, prefix_ids=())
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; they may be part of a character. Empty for ids the tokenizer has no text
        for."""
        return self.bytes_by_id[token_id]

    def bytes_of_first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a whole text: without the space that the tokenizer wrote there."""
        piece = self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if piece is None else self._reading.bytes_of_first(piece)

    def token_text(self, token_id: int) -> str:
        """The text of one token; bytes that are no whole character read U+FFFD."""
        return self.bytes_by_id[token_id].decode(errors="replace")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that determines tokenization."""
        return hashlib.sha256(self._library.to_str().encode()).hexdigest()

    def _special_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        if text is None:
            return None
        index = self._library.token_to_id(text)
        if index is None:
            raise CheckpointError(f"{name} is {text!r}, which the tokenizer does not have")
        return int(index)


class _BytesById(dict[int, bytes]):
    """Fills itself, entry by entry; a hit costs no call."""

    def __init__(self, library: LibraryTokenizer, reading: PieceReading, added: Mapping[int, str]) -> None:
        super().__init__()
        self._library = library
        self._reading = reading
        self._added = added
        self._size = library.get_vocab_size(with_added_tokens=True)

    def __missing__(self, token_id: int) -> bytes:
        if self._reading.byte_level and token_id in self._added:
            # An added token's text is not written in the alphabet of bytes, even where its characters belong to it.
            found = self._added[token_id].encode()
        else:
            piece = self._library.id_to_token(token_id) if 0 <= token_id < self._size else None
            found = b"" if piece is None else self._reading.bytes_of(piece)
        if 0 <= token_id < self._size:
            self[token_id] = found
        return found
