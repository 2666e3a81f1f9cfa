"""Every environment variable the engine reads, in one table.

A variable with our prefix that is not in the table is refused: a misspelt one would otherwise be ignored silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "METRALE_"


@dataclass(frozen=True, slots=True)
class Variable:
    """One declared variable."""

    help: str
    choices: tuple[str, ...] | None = None

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.choices) if self.choices else "any value"


VARIABLES: Final[Mapping[str, Variable]] = {
    "METRALE_MODELS_DIR": Variable("folder that fetched models are kept in"),
    "METRALE_KERNELS": Variable(
        "implementation of the operations; auto takes the fastest that runs here",
        ("auto", "reference", "cpu"),
    ),
}


def environment_violations(environment: Mapping[str, str]) -> list[str]:
    """One sentence for every variable with our prefix that is undeclared or holds a value that is not allowed."""
    found = []
    for name in sorted(environment):
        if not name.upper().startswith(PREFIX):
            continue
        variable = VARIABLES.get(name)
        if variable is None:
            # The common prefix would make any two of them similar.
            endings = [known.removeprefix(PREFIX) for known in VARIABLES]
            close = difflib.get_close_matches(name.upper().removeprefix(PREFIX), endings, n=1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else f"declared: {', '.join(sorted(VARIABLES))}"
            found.append(f"environment variable {name} is not known; {hint}")
        elif variable.choices is not None and environment[name] not in variable.choices:
            found.append(f"environment variable {name} is {environment[name]!r}; allowed: {variable.allowed}")
    return found
