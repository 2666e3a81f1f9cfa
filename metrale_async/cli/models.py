"""``models list`` and ``models pull``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from rich.console import Console
from rich.table import Table

from metrale_async.arguments import argument
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.engine.engine_args import DEFAULT_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ListArgs:
    """Flags of ``models list``."""

    json: bool = argument(False, group="Output", help="print JSON")


LIST_COMMAND_LINE: Final = CommandLine(
    "models list", "Shows the models on this machine and the names of the catalogue.", configurations=[ListArgs]
)
PULL_COMMAND_LINE: Final = CommandLine(
    "models pull",
    "Fetches a model unless it is here already, and prints where it lies.",
    positionals=[Positional("model", "a catalogue name, or a hub id: org/name or org/name:file.gguf", DEFAULT_MODEL)],
)


def run_list(line: Sequence[str]) -> int:
    args = LIST_COMMAND_LINE.parse(line).of(ListArgs)
    from metrale_async.models import list_models

    models = list_models()
    if args.json:
        print(orjson.dumps(models, default=str, option=orjson.OPT_INDENT_2).decode())
        return 0
    table = Table(box=None, header_style="bold")
    for heading in ("name", "size", "licence", "where", "what it is"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for model in models:
        where = str(model.path) if model.path is not None else "not fetched"
        table.add_row(model.name, f"{model.size_bytes / 1e6:,.0f} MB", model.license or "", where, model.description)
    Console().print(table)
    return 0


def run_pull(line: Sequence[str]) -> int:
    name = PULL_COMMAND_LINE.parse(line).words["model"]
    assert name is not None
    from metrale_async.models import pull_model

    print(pull_model(name).path)
    return 0
