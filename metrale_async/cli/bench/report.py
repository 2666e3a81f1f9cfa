"""Result files of benchmarks: raw JSON with the machine's facts, a table, a chart."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from metrale_async.cli.bench.chart import Panel, Series, ladder_chart
from metrale_async.cli.bench.statistics import LevelSummary
from metrale_async.cli.machine import MachineFacts


def result_path(folder: Path, benchmark: str, label: str, now: datetime.datetime) -> Path:
    """Where a result belongs, without suffix: one file per run, named so that a listing sorts by time."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.") or "run"
    return folder / f"{benchmark}-{name}-{now:%Y%m%d-%H%M%S}"


def write_json(path: Path, benchmark: str, machine: MachineFacts, content: Mapping[str, Any]) -> Path:
    """Write ``path`` with suffix .json; ``content`` may hold dataclasses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(path.name + ".json")
    file.write_bytes(
        orjson.dumps(
            {"benchmark": benchmark, "machine": dataclasses.asdict(machine), **content},
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )
    )
    return file


def ladder_table(title: str, rows: Sequence[LevelSummary]) -> Table:
    table = Table(title=f"{title}; times in ms", title_justify="left")
    for heading in ("streams", "requests", "tok/s", "TTFT p50", "p99", "between tokens p50", "p99", "per token"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            f"{row.requests}" + (f" ({row.failed} failed)" if row.failed else ""),
            f"{row.output_tokens_per_s:,.1f}",
            *(
                "-" if value is None else f"{value:,.1f}"
                for value in (
                    row.ttft_p50_ms,
                    row.ttft_p99_ms,
                    row.inter_token_p50_ms,
                    row.inter_token_p99_ms,
                    row.time_per_output_token_ms,
                )
            ),
        )
    return table


def ladder_svg(title: str, ladders: Mapping[str, Sequence[LevelSummary]]) -> str:
    """One chart of one or several ladders: throughput, time to first token, time between tokens."""
    panels = (
        ("Output", "tok/s", "output_tokens_per_s", None),
        ("Time to first token", "ms", "ttft_p50_ms", "ttft_p99_ms"),
        ("Between tokens", "ms", "inter_token_p50_ms", "inter_token_p99_ms"),
    )
    drawn = []
    for heading, unit, solid, dashed in panels:
        series = []
        for colour, (label, rows) in enumerate(ladders.items()):
            for name, suffix, is_dashed in ((solid, " p50", False), (dashed, " p99", True)):
                if name is None:
                    continue
                points = [(row.concurrency, getattr(row, name)) for row in rows if getattr(row, name) is not None]
                series.append(Series(label + (suffix if dashed else ""), points, is_dashed, colour))
        drawn.append(Panel(heading, unit, series))
    return ladder_chart(title, drawn)
