"""What becomes of every field a client may send.

- **honoured**: the fields of the schemas in ``schemas``; null is the same as absent;
- **label**: accepted with any value, and without influence on the answer;
- **refused**: this server cannot do what the field asks for, so any value but a neutral one is a 400 that names it;
- anything else is unknown: ignored, as other servers do, and named in the request's log line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from metrale_async.errors import InvalidRequestError

LABELS: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "spaces_between_special_tokens",
        "user",
    }
)

NEUTRAL_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ((),),
    "audio": (),
    "bad_words": ((),),
    "best_of": (1,),
    "chat_template": (),
    "documents": ((),),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ((),),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ((),),
    "mm_processor_kwargs": ({},),
    "modalities": (("text",),),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ((),),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Refused fields, and the values that ask for nothing; null is one of them everywhere. Lists are written as tuples."""


def check_fields(body: Mapping[str, Any], honoured: Collection[str]) -> list[str]:
    """Refuse what cannot be done; returns the names of unknown fields. Raises InvalidRequestError."""
    unknown = []
    for name, value in body.items():
        if name in honoured or name in LABELS:
            continue
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is None:
            unknown.append(name)
        elif not _is_neutral(name, value, neutral, body):
            raise InvalidRequestError(
                f"{name} is not supported by this server; allowed: {_in_words(neutral)}",
                param=name,
                code="unsupported_parameter",
            )
    return unknown


def _is_neutral(name: str, value: Any, neutral: tuple[Any, ...], body: Mapping[str, Any]) -> bool:
    if value is None or any(_equal(value, allowed) for allowed in neutral):
        return True
    if name == "best_of":
        return type(value) is int and value == body.get("n")
    # Tools that must not be called change nothing: they are not shown to the model.
    return (name == "tools" and body.get("tool_choice") == "none") or (
        name == "functions" and body.get("function_call") == "none"
    )


def _equal(value: Any, allowed: Any) -> bool:
    if isinstance(value, list):
        value = tuple(value) if len(value) <= 1 else value
    # True equals 1 in Python and not in JSON.
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _in_words(neutral: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(json.dumps(value) for value in neutral), "absent"])
