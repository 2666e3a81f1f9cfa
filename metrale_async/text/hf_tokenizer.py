"""A tokenizer from a Hugging Face directory: ``tokenizer.json``, and what the files beside it add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import CheckpointError

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class HuggingFaceFiles:
    """What the tokenizer files of a directory say. Raises CheckpointError naming the file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config = _read_object(directory / "tokenizer_config.json")
        named = {**_read_object(directory / "special_tokens_map.json"), **self._config}
        texts = {name: _token_text(named.get(name)) for name in _SPECIAL_NAMES}
        self.special_tokens: Mapping[str, str] = {name: text for name, text in texts.items() if text is not None}
        """``bos_token``, ``eos_token`` ... to their text."""

    def library_tokenizer(self) -> LibraryTokenizer:
        path = self._directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{self._directory.name} holds no tokenizer.json")
        try:
            library = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for anything it cannot read
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        self._add_tokens(library)
        return library

    def chat_templates(self) -> Mapping[str, str]:
        """Templates by name; the usual one is ``default``. Files go before ``tokenizer_config.json``."""
        value = self._config.get("chat_template")
        found: dict[str, str] = {}
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            for entry in value:
                if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                    raise CheckpointError("chat_template in tokenizer_config.json is neither text nor a list of them")
                found[str(entry["name"])] = str(entry["template"])
        for path in sorted((self._directory / "additional_chat_templates").glob("*.jinja")):
            found[path.stem] = _read_text(path)
        single = self._directory / "chat_template.jinja"
        if single.is_file():
            found["default"] = _read_text(single)
        return found

    def _add_tokens(self, library: LibraryTokenizer) -> None:
        """Tokens that only ``tokenizer_config.json`` has, or only it calls special, as transformers adds them.

        Its ``add_bos_token`` and ``add_eos_token`` say nothing beside a ``tokenizer.json``, which has them built in.
        """
        declared = self._config.get("added_tokens_decoder", {})
        if not isinstance(declared, dict):
            raise CheckpointError("added_tokens_decoder in tokenizer_config.json is not an object")
        for key, entry in sorted(declared.items(), key=lambda item: (len(item[0]), item[0])):
            text = _token_text(entry)
            if text is None or not key.isascii() or not key.isdigit():
                raise CheckpointError(f"added_tokens_decoder in tokenizer_config.json has an unreadable entry {key!r}")
            if library.token_to_id(text) is None and int(key) != library.get_vocab_size(with_added_tokens=True):
                raise CheckpointError(f"tokenizer_config.json adds token {key}, which does not follow tokenizer.json's")
            flags = {name: bool(entry.get(name, False)) for name in _TOKEN_FLAGS}
            flags["special"] = flags["special"] or text in self.special_tokens.values()
            library.add_tokens([AddedToken(text, **flags)])
        known = {token.content for token in library.get_added_tokens_decoder().values()}
        library.add_special_tokens(
            [
                AddedToken(text, special=True, normalized=False)
                for text in self.special_tokens.values()
                if text not in known and library.token_to_id(text) is not None
            ]
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
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
