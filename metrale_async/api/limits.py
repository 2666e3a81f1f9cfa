"""Every bound on what a client may send, in one place.

``BOUNDS`` is the documented table; the constants are what the code compares with. Sampling parameters have their
own table (``metrale_async.engine.PARAMETER_RANGES``), the body's size is ``--max-body-mb`` and the number of sequences
in the engine ``--max-num-seqs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from metrale_async.engine.sampling_params import PARAMETER_RANGES

MAX_JSON_DEPTH: Final = 64
MAX_JSON_VALUES: Final = 2**18
"""The parser keeps the interpreter lock from start to end, for this many small values some 10 ms."""
MAX_MESSAGES: Final = 2048
MAX_CONTENT_PARTS: Final = 1024
MAX_TOOL_CALLS: Final = 128
MAX_PROMPTS: Final = 256
MAX_CHOICES: Final = 256
"""n times prompts."""
MAX_NAME_CHARS: Final = 256
MAX_TEMPLATE_VARIABLES: Final = 64
MAX_HEADER_BYTES: Final = 8190
MAX_REQUEST_ID_CHARS: Final = 128
MAX_INLINE_LOGPROBS: Final = 2000
"""More log-probabilities are put together on a worker thread: one takes about a microsecond."""
MAX_PROMPT_LOGPROBS: Final = 2**20
"""Log-probabilities of prompts in one answer: the tokens' own and the alternatives, for each choice that tells them."""
MAX_ECHOED_CHARS: Final = 2**24
"""Characters of prompts in one answer: n may repeat a prompt that came once."""
BODY_TIMEOUT_S: Final = 30.0
"""For the whole body to arrive: a client that sends a byte now and then does not hold a connection for ever."""
SEND_BUFFER_BYTES: Final = 64 * 1024
"""Unsent bytes after which a stream waits for its client."""
SEND_TIMEOUT_S: Final = 30.0
"""How long an answer waits for a client that takes nothing; then the request ends and its blocks are free."""
MAX_BACKLOG_VALUES: Final = 2**18
"""Tokens, each times its log-probabilities, that may wait for a client that reads slowly; one with more is dropped."""
KEEP_ALIVE_PROBE_S: Final = 30
"""Silence after which the system asks whether the other machine is still there."""
KEEP_ALIVE_PROBE_INTERVAL_S: Final = 10
KEEP_ALIVE_PROBES: Final = 3
"""Questions without an answer after which the connection is closed."""
KEEP_ALIVE_S: Final = 75.0
LINGER_S: Final = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client sees the refusal."""

BOUNDS: Final[Mapping[str, str]] = {
    "body": "--max-body-mb (8) MiB, within 30 s; larger is 413, slower is 408; no Content-Encoding (415)",
    "JSON nesting": f"{MAX_JSON_DEPTH} levels",
    "JSON values": f"{MAX_JSON_VALUES} items, names and brackets in one body; no name twice in an object",
    "headers": f"{MAX_HEADER_BYTES} bytes for the request line and for each header",
    "messages": f"1 to {MAX_MESSAGES}",
    "content parts of a message": f"up to {MAX_CONTENT_PARTS}",
    "tool_calls of a message": f"up to {MAX_TOOL_CALLS}",
    "prompts of a completion": f"1 to {MAX_PROMPTS}",
    "n": PARAMETER_RANGES["n"].accepted,
    "n times prompts": f"up to {MAX_CHOICES}",
    "stop": PARAMETER_RANGES["stop"].accepted,
    "stop_token_ids": PARAMETER_RANGES["stop_token_ids"].accepted,
    "logit_bias": PARAMETER_RANGES["logit_bias"].accepted,
    "logprobs, top_logprobs, prompt_logprobs": PARAMETER_RANGES["logprobs"].accepted,
    "chat_template_kwargs": f"up to {MAX_TEMPLATE_VARIABLES} names",
    "names, ids, cache_salt": f"up to {MAX_NAME_CHARS} characters",
    "prompt": "what the context holds (--max-seq-len), and 16 Mi characters after the chat template",
    "log-probabilities of prompts": f"up to {MAX_PROMPT_LOGPROBS} in one answer, alternatives and all choices counted",
    "echoed text": f"up to {MAX_ECHOED_CHARS} characters in one answer",
    "unsent output": f"{SEND_BUFFER_BYTES} bytes; a client that takes nothing for {SEND_TIMEOUT_S:g} s is dropped",
    "unread tokens of a stream": f"{MAX_BACKLOG_VALUES}, log-probabilities counted; a client further behind is dropped",
}
