"""Bearer tokens: read once, compared in constant time, asked for before a body is read."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from metrale_async.errors import AuthenticationError, ConfigurationError

MAX_TOKENS_FILE_BYTES: Final = 2**20
MIN_TOKEN_CHARS: Final = 8

logger = logging.getLogger(__name__)


class TokenCheck:
    """Knows the digests of the accepted tokens, never the tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """One token a line; empty lines and lines that begin with # are skipped. Raises ConfigurationError."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_TOKENS_FILE_BYTES + 1)
                mode = path.stat().st_mode
        except OSError as error:
            raise ConfigurationError(f"--auth-tokens-file {path}: {error.strerror}") from error
        if len(data) > MAX_TOKENS_FILE_BYTES:
            raise ConfigurationError(f"--auth-tokens-file {path} has more than {MAX_TOKENS_FILE_BYTES} bytes")
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("the tokens file can be read by other users of this machine; chmod 600 keeps it private")
        try:
            lines = [line.strip() for line in data.decode("ascii").splitlines()]
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"--auth-tokens-file {path} holds something else than ASCII") from error
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise ConfigurationError(f"--auth-tokens-file {path} holds no token")
        if any(len(token) < MIN_TOKEN_CHARS or " " in token for token in tokens):
            raise ConfigurationError(
                f"--auth-tokens-file {path} holds a token with a space or fewer than {MIN_TOKEN_CHARS} characters"
            )
        return cls(tokens)

    def check(self, authorization: str | None) -> None:
        """Raise AuthenticationError unless the header's value is ``Bearer`` and an accepted token."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode(errors="surrogateescape")).digest()
        accepted = False
        # All of them, so that the time does not tell which one was close.
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        if scheme.lower() != "bearer" or not accepted:
            raise AuthenticationError(
                "no token was sent; expected the header Authorization: Bearer TOKEN"
                if authorization is None
                else "the token is not accepted"
            )
