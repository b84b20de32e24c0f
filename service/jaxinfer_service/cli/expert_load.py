"""`jaxinfer inspect --expert-load`: how evenly a server's tokens spread over its experts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from jaxinfer.expert_load import ACCEPTABLE, PROBLEM, imbalance
from jaxinfer_service.cli import console, remote

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer_service.cli.remote import RemoteOptions
    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

CALL_SECONDS = 5.0
BUSIEST = 3  # experts named of each layer
FEW = 100  # tokens an expert, below which chance alone makes ratios large
BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # bars from nothing to twice the mean and more
_OTHER_COLUMNS = 58  # of the terminal's width


def show(where: RemoteOptions, seconds: float | None, as_json: bool) -> None:
    """Print what a server counted, since its start or for so many `seconds` from now on."""
    import grpc

    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

    with where.client() as client:
        try:
            info = client.control.ServerInfo(pb.ServerInfoRequest(), timeout=CALL_SECONDS)
            load = client.control.ExpertLoad(pb.ExpertLoadRequest(), timeout=CALL_SECONDS)
            if seconds is not None and load.layers:
                before = load
                time.sleep(seconds)
                load = client.control.ExpertLoad(pb.ExpertLoadRequest(), timeout=CALL_SECONDS)
                load = since(before, load)
        except grpc.RpcError as error:
            remote.nothing_to_show(client, error)
    name = f"{', '.join(info.model_names)} at {client.target}"
    if not load.layers:
        console.fail(f"{name} has no experts: every token goes through the whole of the model")
    if as_json:
        typer.echo(json.dumps(as_fields(load), indent=1))
        return
    from rich.console import Console

    screen = Console()
    bars = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII
    screen.print(table(name, load, max(8, screen.width - _OTHER_COLUMNS), bars))


def since(before: pb.ExpertLoadResponse, now: pb.ExpertLoadResponse) -> pb.ExpertLoadResponse:
    """What was counted between two looks; `time` is how long that was."""
    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb

    if now.time < before.time or len(now.layers) != len(before.layers):
        console.fail("the server was started again between the two looks; look again")
    result = pb.ExpertLoadResponse(
        time=now.time - before.time,
        experts=now.experts,
        experts_per_token=now.experts_per_token,
    )
    for old, new in zip(before.layers, now.layers, strict=True):
        tokens = np.array(new.tokens) - np.array(old.tokens)
        result.layers.add(layer=new.layer, tokens=tokens.tolist(), imbalance=imbalance(tokens))
    return result


def as_fields(load: pb.ExpertLoadResponse) -> dict[str, Any]:
    """The same for programs; an imbalance is null where there are no tokens."""
    layers = [
        {"layer": layer.layer, "imbalance": _ratio(layer), "tokens": list(layer.tokens)}
        for layer in load.layers
    ]
    return {
        "seconds": load.time,
        "experts": load.experts,
        "experts_per_token": load.experts_per_token,
        "layers": layers,
    }


def table(name: str, load: pb.ExpertLoadResponse, width: int, bars: str = BLOCKS) -> Table:
    """One row a layer, with at most `width` bars; the last row is of all layers together."""
    from rich.table import Table

    from jaxinfer_service.cli.top import duration

    sums = [sum(layer.tokens) for layer in load.layers]
    tokens = max(sums) // load.experts_per_token
    shown = Table(
        title=f"{name}: {tokens:,} tokens in {duration(load.time)}, {load.experts_per_token} of "
        f"{load.experts} experts each",
        caption=_caption(load, tokens, width, bars),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("layer", "routed", "max/mean"):
        shown.add_column(heading, justify="right")
    shown.add_column("busiest experts")
    shown.add_column("load by expert", no_wrap=True)
    for layer, total in zip(load.layers, sums, strict=True):
        shares = [f"{expert} ({share:.1%})" for expert, share in busiest(layer.tokens)]
        shown.add_row(
            str(layer.layer),
            f"{total:,}",
            _verdict(_ratio(layer)),
            ", ".join(shares),
            heights(layer.tokens, width, bars),
        )
    ratios = [ratio for layer in load.layers if (ratio := _ratio(layer)) is not None]
    bad = sum(ratio > PROBLEM for ratio in ratios)
    shown.add_section()
    shown.add_row(
        "all",
        f"{sum(sums):,}",
        _verdict(max(ratios, default=None)),
        f"{bad} of {len(load.layers)} layers above {PROBLEM:.1f}",
        "",
    )
    return shown


def busiest(tokens: Sequence[int]) -> list[tuple[int, float]]:
    """(expert, share of the layer's tokens) of those that have most; none without tokens."""
    order = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])[:BUSIEST]
    total = sum(tokens)
    return [(expert, tokens[expert] / total) for expert in order if tokens[expert]]


def heights(tokens: Sequence[int], width: int, bars: str) -> str:
    """A bar an expert, half as high as they get at the mean. Where there are more experts than
    columns, a bar is the highest of those that share one."""
    mean, last = sum(tokens) / len(tokens), len(bars) - 1
    if not mean:
        return bars[0] * min(len(tokens), width)
    share = -(-len(tokens) // width)
    highest = (max(tokens[i : i + share]) for i in range(0, len(tokens), share))
    levels = (min(last, round(count / mean * last / 2)) for count in highest)
    return "".join(bars[level] for level in levels)


def _ratio(layer: pb.LayerExperts) -> float | None:
    return layer.imbalance if layer.HasField("imbalance") else None


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "none yet"
    if ratio < ACCEPTABLE:
        return f"[green]{ratio:.2f}[/green]"
    word, colour = ("problem", "red") if ratio > PROBLEM else ("uneven", "yellow")
    return f"[{colour}]{ratio:.2f} {word}[/{colour}]"


def _caption(load: pb.ExpertLoadResponse, tokens: int, width: int, bars: str) -> str:
    share = -(-load.experts // width)
    lines = [
        f"max/mean: 1.0 is ideal, below {ACCEPTABLE} acceptable, above {PROBLEM} a problem.",
        f"Bars: {bars[len(bars) // 2]} is the mean, {bars[-1]} twice the mean or more"
        + (f"; each is the busiest of {share} experts." if share > 1 else "."),
    ]
    if tokens * load.experts_per_token < FEW * load.experts:
        lines.append(f"Fewer than {FEW} tokens an expert: chance alone makes ratios large.")
    return "\n".join(lines)
