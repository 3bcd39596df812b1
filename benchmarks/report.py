"""What a run leaves: a table, a JSON file, and the same tables as markdown."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.setup import VARIANTS, Row, Setup

COLUMNS = (*VARIANTS, "peer", "limit")


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns that hold anything."""
    return [column for column in COLUMNS if any(column in row.values for row in rows)]


def cell(row: Row, column: str) -> str:
    """A figure with its ratio to the imperative loop in brackets."""
    value, base = row.values.get(column, ""), row.values.get("imperative")
    if isinstance(value, str):
        return value
    ratio = ""
    if row.compared and column != "imperative" and isinstance(base, (int, float)) and base > 0:
        ratio = f" ({value / base:.2f})"
    return number(value) + ratio


def number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def show(rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Prints all sections as one table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(title="In brackets: ratio to the imperative loop", caption=machine_line(machine))
    columns = columns_of(rows)
    for name in ("", "case", "", *columns):
        table.add_column(name, justify="right" if name in columns else "left")
    for section, members in groupby(rows, lambda row: row.section):
        table.add_section()
        for index, row in enumerate(members):
            table.add_row("" if index else section, row.case, row.unit, *(cell(row, column) for column in columns))
    console.print(table)


def markdown(path: Path) -> str:
    """The tables of a JSON file that `write` made, one for each section."""
    machine, rows = read(path)
    lines = [machine_line(machine) + ".", ""]
    for section, members in groupby(rows, lambda row: row.section):
        members = list(members)
        columns = columns_of(members)
        lines += [f"### {section}", "", "| case | unit | " + " | ".join(columns) + " |"]
        lines += ["|---|---|" + "---:|" * len(columns)]
        for row in members:
            cells = [row.case, row.unit, *(cell(row, column).replace("|", "/") for column in columns)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def write(path: Path, rows: Sequence[Row], machine: dict[str, Any]) -> None:
    content = {"machine": machine, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"machine", "rows"} <= set(content):
        raise SystemExit(f"{path}: expected a JSON file that python -m benchmarks wrote.")
    return content["machine"], [Row(**row) for row in content["rows"]]


def machine_of(setup: Setup) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else cpu_name(),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": setup.rounds,
        "seed": setup.seed,
    }


def machine_line(machine: dict[str, Any]) -> str:
    text = "{date}; {device}, {threads} threads; torch {torch}, Python {python}; {dtype}; medians of {rounds} rounds"
    return text.format(**machine)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
