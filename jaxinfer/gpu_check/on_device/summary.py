"""The short table at the end of a run, and whether all went well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from jaxinfer.gpu_check.on_device.tasks import Record

COLUMNS = ("difference", "µs", "floor", "of floor", "others, µs", "best sizes")


def failures(records: list[Record]) -> list[str]:
    """What went wrong, in words. Times short of their target are no failure."""
    wrong = [r for r in records if "error" in r or r.get("passed") is False]
    return [f"{record['task']}: {record.get('error') or _wrong(record)}" for record in wrong]


def table(report: Record) -> Table:
    """A row a kernel, and one for each size of the whole step."""
    dry = not report["executed_on_gpu"]
    title = f"{report.get('device', 'no device')}, jax {report.get('jax', '?')}"
    if dry:
        title = (
            f"Dry run on {title}: nothing ran on a GPU, and times are of tiny sizes, interpreted"
        )
    found = Table(title=title, title_justify="left")
    found.add_column("kernel")
    for heading in COLUMNS:
        found.add_column(heading, justify="right")
    found.add_column("result")
    by_case: dict[str, dict[str, Record]] = {}
    for record in report["records"]:
        kind, _, case = record["task"].partition(": ")
        by_case.setdefault(case or kind, {})[kind] = record
    for case, records in by_case.items():
        if "step" in records:
            for cells in _step_rows(records["step"]):
                found.add_row(*cells)
        else:
            found.add_row(case, *_cells(records), _verdict(records))
    return found


def _cells(records: dict[str, Record]) -> Iterator[str]:
    check, time, search = (records.get(kind, {}) for kind in ("check", "time", "search"))
    yield f"{check['difference']:.1e}" if "difference" in check else "-"
    yield f"{time['us']['median']:.0f}" if "us" in time else "-"
    yield f"{time['floor_us']:.0f}" if "us" in time else "-"
    yield f"{time['of_floor']:.0%}" if "of_floor" in time else "-"
    others = time.get("baselines", {})
    known = [f"{name} {one['us']['median']:.0f}" for name, one in others.items() if "us" in one]
    yield ", ".join(known) or "-"
    best = search.get("best")
    if "best_us" not in search:
        yield "-"
    else:
        sizes = "/".join(str(size) for size in best.values()) if best else "the rule's"
        yield f"{sizes}: {search['best_us']:.0f} µs"


def _step_rows(record: Record) -> Iterator[tuple[str, ...]]:
    for row in record.get("rows", []):
        floor = f"{row['floor_us']:.0f}" if "floor_us" in row else "-"
        part = f"{row['of_floor']:.0%}" if "of_floor" in row else "-"
        speed = f"{row['tokens_per_second']:.0f} tokens/s"
        name = f"step of {record['model']}, {row['rows']} rows of {row['context']}"
        yield (name, "-", f"{1e3 * row['tpot_ms']:.0f}", floor, part, "-", speed, _one(record))
    if not record.get("rows"):
        yield ("step", *["-"] * len(COLUMNS), _one(record))


def _verdict(records: dict[str, Record]) -> str:
    verdicts = {kind: _one(record) for kind, record in records.items()}
    bad = [f"{kind} {said}" for kind, said in verdicts.items() if said != "ok"]
    return ", ".join(bad) or "ok"


def _one(record: Record) -> str:
    if failures([record]):
        return "[red]FAILED[/]"
    if "skipped" in record:
        return f"skipped ({record['skipped']})"
    return "ok" if record.get("met", True) else "short of its target"


def _wrong(record: Record) -> str:
    if "tolerance" in record:
        by = f"{record['difference']:.2e}, {record['tolerance']} allowed"
        return f"differs from the reference by {by}"
    return f"{record['peak_bytes']} bytes at its peak, {record['promised_bytes']} promised"


def as_words(report: dict[str, Any]) -> str:
    """How many tasks did what."""
    records = report["records"]
    skipped = sum("skipped" in record for record in records)
    return (
        f"{len(records) - skipped} tasks done, {skipped} skipped, {len(failures(records))} failed"
    )
