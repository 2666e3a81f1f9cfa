"""Every exception that leaves a public function of this package.

    MetraleError
    ├── ConfigurationError            the operator's: a flag, an environment variable, a combination of them
    ├── ModelError                    the checkpoint's
    │   ├── ModelNotFoundError        no such path, catalogue name or hub id
    │   ├── UnsupportedModelError     a model type, activation, tensor type ... this engine has no code for
    │   └── CheckpointError           a missing, unused, misshapen or truncated tensor or file
    ├── RequestError                  the client's: refused before any event, nothing was computed
    │   ├── InvalidRequestError       400, names the field
    │   │   └── RequestTooLongError   400, the prompt can never fit
    │   ├── AuthenticationError       401
    │   ├── UnknownModelError         404
    │   ├── PayloadTooLargeError      413
    │   └── QueueFullError            429, with the seconds after which a retry makes sense
    └── EngineError                   the engine's
        ├── EngineUnavailableError    503, not ready yet, draining or stopped
        └── StepError                 500, the device or a step failed under this request

``status`` and ``code`` are what the HTTP surface sends; the embedding API raises the same objects.
"""

from __future__ import annotations

from collections.abc import Sequence


class MetraleError(Exception):
    """Root of the tree."""


class ConfigurationError(MetraleError):
    """One or more flags are wrong. ``violations`` holds one sentence for each, all of them at once."""

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations: tuple[str, ...] = (violations,) if isinstance(violations, str) else tuple(violations)
        super().__init__("\n".join(self.violations))


class ModelError(MetraleError):
    """A model cannot be served."""


class ModelNotFoundError(ModelError):
    """No model lies at the given path, catalogue name or hub id."""


class UnsupportedModelError(ModelError):
    """The checkpoint asks for something this engine does not implement; the message names it."""


class CheckpointError(ModelError):
    """The checkpoint contradicts itself: missing or unused tensor, wrong shape, truncated file."""


class RequestError(MetraleError):
    """A request is refused; nothing was computed for it."""

    status = 400
    error_type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field has a wrong type, value or size. ``param`` names the field."""

    code = "invalid_value"


class RequestTooLongError(InvalidRequestError):
    """The prompt, or prompt plus wanted tokens, can never fit; the message holds both numbers."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """No token, or a wrong one."""

    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server reads."""

    status = 413
    code = "payload_too_large"


class QueueFullError(RequestError):
    """As many requests as ``--max-num-seqs`` allows are in the engine."""

    status = 429
    error_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(MetraleError):
    """The engine failed a request that was accepted."""

    status = 500
    error_type = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineUnavailableError(EngineError):
    """The engine is not ready yet, is draining, or has stopped."""

    status = 503
    code = "unavailable"


class StepError(EngineError):
    """A step failed while this request was part of it."""

    code = "step_failed"
