"""Several ladders in one table and one chart: ours beside peers, or before and after a change.

    python bench/compare.py bench/results/ladder-*.json --output bench/results/comparison.svg

Ladders are made with ``python -m metrale_async bench ladder --url URL --label NAME``; labels become the names of lines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from metrale_async.cli.bench.report import ladder_svg
from metrale_async.cli.bench.statistics import LevelSummary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of bench ladder")
    parser.add_argument("--output", type=Path, help="the chart, as SVG")
    args = parser.parse_args()
    ladders: dict[str, list[LevelSummary]] = {}
    machines = set()
    for path in args.results:
        content = orjson.loads(path.read_bytes())
        machines.add((content["machine"]["cpu"], content["machine"]["usable_cores"]))
        label = content["label"] if content["label"] not in ladders else f"{content['label']} ({path.stem[-15:]})"
        ladders[label] = [LevelSummary(**row) for row in content["levels"]]
    if len(machines) > 1:
        print(f"these were measured on different machines: {sorted(machines)}", file=sys.stderr)
    Console().print(throughput_table(ladders))
    if args.output is not None:
        args.output.write_text(ladder_svg(" and ".join(ladders), ladders), "utf-8")
    return 0


def throughput_table(ladders: dict[str, list[LevelSummary]]) -> Table:
    """Output tokens per second by level; each ladder after the first with its ratio to the first."""
    table = Table(title="output tokens per second", title_justify="left")
    table.add_column("streams", justify="right")
    for label in ladders:
        table.add_column(label, justify="right")
    first = next(iter(ladders))
    by_level = {label: {row.concurrency: row.output_tokens_per_s for row in rows} for label, rows in ladders.items()}
    for level in sorted({level for rows in by_level.values() for level in rows}):
        cells = []
        for label, rows in by_level.items():
            value, base = rows.get(level), by_level[first].get(level)
            ratio = f" ({value / base:.2f}x)" if value and base and label != first else ""
            cells.append("-" if value is None else f"{value:,.1f}{ratio}")
        table.add_row(str(level), *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
