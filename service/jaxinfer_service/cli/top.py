"""`jaxinfer top`: what a running server is doing."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.option_groups import takes_groups
from jaxinfer.quantization.kinds import NONE
from jaxinfer_service.cli import remote
from jaxinfer_service.cli.remote import RemoteOptions

if TYPE_CHECKING:
    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

CALL_SECONDS = 5.0  # for the first answer
WIDTH, MAP_LINES = (40, 120), 4  # columns of a frame, lines of a KV group's page map
FREE, USED, CACHED, SHARED = ".", "#", "+", "="
_CELLS = bytes.maketrans(bytes(range(4)), (FREE + USED + CACHED + SHARED).encode())
_LABEL = 10  # columns


@takes_groups
def top(
    interval: Annotated[
        float, typer.Option(min=0.1, max=60, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    *,
    where: RemoteOptions,
) -> None:
    """Watch a server: slots, queue, KV pages, tokens a second, latencies. Ctrl-C leaves."""
    import grpc

    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

    width = min(max(shutil.get_terminal_size().columns, WIDTH[0]), WIDTH[1])
    cells = (width - _LABEL) * MAP_LINES
    with where.client() as client:
        try:
            info = client.control.ServerInfo(pb.ServerInfoRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            remote.nothing_to_show(client, error)
        request = pb.WatchLoadRequest(interval=interval, map_cells=cells)
        updates: Any = client.control.WatchLoad(request)
        try:
            with _screen(once) as show:
                for lines in _frames(client.target, info, updates, interval, width):
                    show("\n".join(lines))
                    if once:
                        return
        except KeyboardInterrupt:
            return
        except grpc.RpcError as error:
            remote.gone(client, error)
        finally:
            updates.cancel()


@contextlib.contextmanager
def _screen(once: bool) -> Iterator[Callable[[str], None]]:
    """Shows one frame after the other: in its place on a terminal, below it elsewhere."""
    if once or not sys.stdout.isatty():
        yield typer.echo if once else lambda text: typer.echo(text + "\n")
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)


def _frames(
    server: str,
    info: pb.ServerInfoResponse,
    updates: Iterable[pb.WatchLoadResponse],
    interval: float,
    width: int,
) -> Iterator[list[str]]:
    """A frame for each update, with rates over the time since the one before."""
    before = None
    for update in updates:
        seconds = interval if before is None else update.load.time - before
        yield frame(server, info, update, seconds, width)
        before = update.load.time


def frame(
    server: str,
    info: pb.ServerInfoResponse,
    update: pb.WatchLoadResponse,
    seconds: float,
    width: int,
) -> list[str]:
    """The lines that show an update; `seconds` is the time that its steps took."""
    load, counters = update.load, update.load.counters
    if update.steps_left_out and update.steps:
        seconds = load.time - update.steps[0].time
    per_second = 1 / seconds if seconds > 0 else 0.0
    prefill = sum(step.chunk_tokens for step in update.steps) * per_second
    decode = sum(step.decodes for step in update.steps) * per_second
    steps = len(update.steps) * per_second
    taken = min(load.running, load.slots)  # a last token that is on its way needs no slot
    bar = _bar(taken, load.slots, width - _LABEL)
    rows = [
        ("server", f"{', '.join(info.model_names)} at {server}, up {duration(load.time)}"),
        *(("", line) for line in _how(info, width - _LABEL)),
        ("slots", f"{taken} of {load.slots} used"),
        ("", bar),
        ("queue", f"{load.waiting} waiting, {load.waiting_tokens} prompt tokens"),
        *_page_rows(update, width - _LABEL),
        ("tokens/s", f"{prefill:.0f} prefill, {decode:.0f} decode, in {steps:.0f} steps/s"),
        ("TTFT", _latency(load.ttft)),
        ("TPOT", _latency(load.tpot)),
        ("prefix", _hit_rate(counters.prefix_hits, counters.prefix_queries, info.prefix_cache)),
        ("preempted", f"{counters.preemptions}, {counters.thrashes} of them thrashing"),
        (
            "requests",
            f"{counters.received} received, {counters.finished} finished,"
            f" {counters.aborted} aborted, {counters.refused} refused",
        ),
    ]
    return [f"{label:<{_LABEL}}{text}"[:width].rstrip() for label, text in rows]


def _how(info: pb.ServerInfoResponse, width: int) -> list[str]:
    """How it is served, in a few words, in lines of this width."""
    parts = [
        f"jaxinfer {info.version}".strip(),
        info.dtype,
        f"weights {info.quantization}" if info.quantization not in ("", NONE) else "",
        f"KV {info.kv_dtype}" if info.kv_dtype not in ("", info.dtype) else "",
        f"preset {info.preset}" if info.preset else "",
        f"{info.max_model_len} tokens a sequence",
        f"chunks of {info.chunk_tokens}",
        f"deterministic ({info.determinism})" if info.deterministic else "",
    ]
    return textwrap.wrap(", ".join(filter(None, parts)), width)


def _page_rows(update: pb.WatchLoadResponse, width: int) -> Iterator[tuple[str, str]]:
    pages, size = update.load.pages, update.load.page_size
    total = pages.used + pages.cached + pages.free
    yield (
        "KV pages",
        f"{pages.used} used {USED} (shared {SHARED}), {pages.cached} cached {CACHED}, {pages.free}"
        f" free {FREE}, of {total} with {size} tokens",
    )
    for group in update.page_maps:
        cells = group.cells.translate(_CELLS).decode()
        for start in range(0, len(cells), width):
            yield "", cells[start : start + width]


def _bar(part: int, whole: int, width: int) -> str:
    """As many characters as slots, or a share of the width where they are more."""
    size = min(whole, width)
    filled = -(-part * size // whole) if whole else 0
    return USED * filled + FREE * (size - filled)


def _latency(percentiles: pb.Percentiles) -> str:
    names = [name for name in ("p50", "p90", "p99") if percentiles.HasField(name)]
    values = [f"{name} {1000 * getattr(percentiles, name):.1f} ms" for name in names]
    return ", ".join(values) or "none yet"


def _hit_rate(hits: int, queries: int, on: bool) -> str:
    if not on:
        return "cache is off"
    if not queries:
        return "nothing looked up yet"
    return f"{100 * hits / queries:.0f}% hits, {hits} of {queries} prompt tokens"


def duration(seconds: float) -> str:
    """1 d 2 h, 3 h 4 min, 5 min 6 s, or 7 s."""
    left = int(seconds)
    parts: list[str] = []
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, unit)
        if count or parts or unit == 1:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])
