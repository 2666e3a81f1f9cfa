"""The server's configuration: one frozen object, declared once, built from flags or keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass

from metrale_async.arguments import argument, violations
from metrale_async.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Where the server listens, whom it lets in, how much it reads, how it ends, and what it writes to its log."""

    host: str = argument("127.0.0.1", group="Server", help="address to listen on; the default is this machine only")
    port: int = argument(8888, group="Server", help="port to listen on; 0: any free one", minimum=0, maximum=65535)
    served_model_name: str | None = argument(
        None, group="Server", help="model id for clients; not set, the name the model was given by", metavar="NAME"
    )
    require_auth: bool = argument(
        False, group="Server", help="every route but /health* needs an Authorization: Bearer token"
    )
    auth_tokens_file: str | None = argument(
        None, group="Server", help="file of accepted tokens, one a line; # begins a comment line", metavar="PATH"
    )
    max_body_mb: float = argument(
        8.0, group="Server", help="largest request body in MiB; a larger one is a 413", minimum=0.001, maximum=256
    )
    drain_timeout: float = argument(
        15.0,
        group="Server",
        help="seconds that running requests may go on after SIGTERM or SIGINT",
        minimum=0,
        maximum=3600,
    )

    log_format: str = argument("text", group="Logging", help="form of a log line", choices=("text", "json"))
    log_level: str = argument(
        "info", group="Logging", help="least severe lines to write", choices=("debug", "info", "warning", "error")
    )
    log_prompts: bool = argument(
        False, group="Logging", help="write the beginning of each prompt to the log; it may hold private text"
    )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)

    def __post_init__(self) -> None:
        found = violations(self)
        if not self.host:
            found.append("--host is empty; allowed: an address or a host name")
        if self.served_model_name is not None and not 1 <= len(self.served_model_name) <= 256:
            found.append(f"--served-model-name has {len(self.served_model_name)} characters; allowed: 1 to 256")
        if self.require_auth and self.auth_tokens_file is None:
            found.append("--require-auth is given without --auth-tokens-file, so nobody could pass")
        if self.auth_tokens_file is not None and not self.require_auth:
            found.append("--auth-tokens-file is given without --require-auth, so nobody would be asked for a token")
        if found:
            raise ConfigurationError(found)
