"""How a flag is declared once and used everywhere.

A configuration is a frozen dataclass whose fields are made with :func:`argument`. The command line (``cli/``) builds
its parser, its grouped ``--help`` and the README's flag table from these declarations, the embedding API takes the same
names as keyword arguments, and :func:`violations` checks both in the same words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ArgumentInfo:
    """What is known of one flag besides its name, type and default."""

    group: str
    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    maximum: float | None
    auto: bool
    """The word ``auto`` (stored as ``None``) is accepted beside a number."""
    metavar: str | None


def argument(
    default: Any,
    *,
    group: str,
    help: str,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    auto: bool = False,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a flag; limits are inclusive."""
    info = ArgumentInfo(group, help, tuple(choices) if choices else None, minimum, maximum, auto, metavar)
    return dataclasses.field(default=default, metadata={"argument": info})


def argument_info(field: dataclasses.Field[Any]) -> ArgumentInfo | None:
    """The declaration behind a dataclass field, or None for a field that is no flag."""
    info = field.metadata.get("argument")
    return info if isinstance(info, ArgumentInfo) else None


def flag_name(field_name: str) -> str:
    """``max_seq_len`` -> ``--max-seq-len``."""
    return "--" + field_name.replace("_", "-")


def allowed_range(info: ArgumentInfo) -> str:
    """The allowed values in words, as used in messages and in the flag table."""
    if info.choices:
        return "one of " + ", ".join(info.choices)
    low = None if info.minimum is None else _number(info.minimum)
    high = None if info.maximum is None else _number(info.maximum)
    if low is not None and high is not None:
        words = f"{low} to {high}"
    elif low is not None:
        words = f"at least {low}"
    elif high is not None:
        words = f"at most {high}"
    else:
        words = "any value"
    return f"{words}, or auto" if info.auto else words


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def violations(arguments: Any) -> list[str]:
    """One sentence for every field of a configuration dataclass whose value is outside its declared range."""
    found: list[str] = []
    for field in dataclasses.fields(arguments):
        info = argument_info(field)
        if info is None:
            continue
        value = getattr(arguments, field.name)
        if value is None and (info.auto or field.default is None):
            continue
        if info.choices is not None:
            wrong = value not in info.choices
        elif info.minimum is None and info.maximum is None:
            wrong = False
        elif isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            wrong = True
        else:
            wrong = (info.minimum is not None and value < info.minimum) or (
                info.maximum is not None and value > info.maximum
            )
        if wrong:
            found.append(f"{flag_name(field.name)} is {value!r}; allowed: {allowed_range(info)}")
    return found
