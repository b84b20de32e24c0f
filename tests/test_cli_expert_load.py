"""`jaxinfer inspect --expert-load`: the Control call, and the table by hand-computable figures."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import typer
from fake_engine import ScriptedEngine
from jaxinfer_service.cli.expert_load import ASCII, BLOCKS, busiest, heights, since, table
from jaxinfer_service.pb.jaxinfer.v1 import control_pb2 as pb
from rich.console import Console
from serving import in_loop, server_thread, serving
from test_cli import run, words

from jaxinfer.expert_load import ExpertLoad, imbalance

EVEN, UNEVEN, BAD = [100] * 4, [150, 150, 50, 50], [300, 100, 0, 0]


def engine_with(*tokens: list[int], layers: tuple[int, ...] = (1, 2, 5)) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.experts = ExpertLoad(layers[: len(tokens)], 2, np.array(tokens, np.int64))
    return engine


def response(*tokens: list[int], seconds: float = 61.0) -> pb.ExpertLoadResponse:
    layers = [
        pb.LayerExperts(layer=i, tokens=counts, imbalance=imbalance(np.array(counts)))
        for i, counts in enumerate(tokens)
    ]
    experts = len(tokens[0])
    return pb.ExpertLoadResponse(time=seconds, experts=experts, experts_per_token=2, layers=layers)


def drawn(load: pb.ExpertLoadResponse, width: int = 40, bars: str = BLOCKS) -> list[str]:
    screen = Console(width=120, force_terminal=False, color_system=None)
    with screen.capture() as captured:
        screen.print(table("m at here:1", load, width, bars))
    return captured.get().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").split("│")]


@in_loop
async def test_control_gives_every_layers_tokens_and_imbalance():
    async with serving(engine_with(EVEN, BAD, [0] * 4)) as (_, client):
        load = await client.control.ExpertLoad(pb.ExpertLoadRequest())
    assert (load.experts, load.experts_per_token) == (4, 2) and 0 < load.time < 60
    assert [layer.layer for layer in load.layers] == [1, 2, 5]
    assert [list(layer.tokens) for layer in load.layers] == [EVEN, BAD, [0] * 4]
    assert [layer.imbalance for layer in load.layers[:2]] == [1.0, 3.0]
    assert not load.layers[2].HasField("imbalance")


@in_loop
async def test_control_gives_none_of_a_dense_model():
    async with serving(ScriptedEngine()) as (_, client):
        load = await client.control.ExpertLoad(pb.ExpertLoadRequest())
    assert not load.layers and load.experts == load.experts_per_token == 0


def test_the_table_shows_ratios_busiest_experts_and_bars():
    lines = drawn(response(EVEN, UNEVEN, BAD))
    assert lines[0].strip() == "m at here:1: 200 tokens in 1 min 1 s, 2 of 4 experts each"
    rows = [cells(line) for line in lines if line.startswith("│")]
    assert rows == [
        ["0", "400", "1.00", "0 (25.0%), 1 (25.0%), 2 (25.0%)", "▄▄▄▄"],
        ["1", "400", "1.50 uneven", "0 (37.5%), 1 (37.5%), 2 (12.5%)", "▆▆▂▂"],
        ["2", "400", "3.00 problem", "0 (75.0%), 1 (25.0%)", "█▄"],
        ["all", "1,200", "3.00 problem", "1 of 3 layers above 2.0", ""],
    ]
    assert "1.0 is ideal, below 1.5 acceptable, above 2.0 a problem" in " ".join(lines)
    assert "Bars: ▄ is the mean, █ twice the mean or more." in lines[-1]


def test_few_tokens_and_none_are_said_to_be_so():
    text = "\n".join(drawn(response([3, 1, 0, 0], [0] * 4)))
    assert "chance alone makes ratios large" in text and "none yet" in text
    assert "chance" not in "\n".join(drawn(response([100] * 4)))


def test_more_experts_than_columns_share_them():
    tokens = [10] * 62 + [40, 10]
    text = "\n".join(drawn(response(tokens), width=16))
    assert "▄" * 15 + "█" in text and "each is the busiest of 4 experts" in text
    assert heights([1, 1, 1, 5], 2, BLOCKS) == "▂█"
    assert heights([2, 2, 0, 4], 9, ASCII) == "== @" and heights([0, 0, 0], 2, BLOCKS) == "  "


def test_busiest():
    assert busiest([1, 5, 0, 4]) == [(1, 0.5), (3, 0.4), (0, 0.1)]
    assert busiest([0, 0]) == []


def test_the_command_asks_a_server():
    with server_thread(engine_with(EVEN, BAD)) as address:
        shown = run("inspect", "--expert-load", "--server", address)
        fields = json.loads(run("inspect", "--expert-load", "--server", address, "--json").stdout)
    assert shown.exit_code == 0 and f"fake at {address}: 200 tokens" in words(shown)
    assert "3.00 problem" in words(shown) and "1 of 2 layers above 2.0" in words(shown)
    assert 0 < fields.pop("seconds") < 60
    assert fields == {
        "experts": 4,
        "experts_per_token": 2,
        "layers": [
            {"layer": 1, "imbalance": 1.0, "tokens": EVEN},
            {"layer": 2, "imbalance": 3.0, "tokens": BAD},
        ],
    }


def test_the_command_asks_for_what_comes_next():
    engine = engine_with(EVEN)

    def go_on():
        time.sleep(0.4)
        engine.experts = engine.experts.plus(np.array([BAD]))

    with server_thread(engine) as address:
        threading.Timer(0, go_on).start()
        asked = ("inspect", "--expert-load", "--server", address, "--json", "--over", "1")
        fields = json.loads(run(*asked).stdout)
    assert fields["layers"] == [{"layer": 1, "imbalance": 3.0, "tokens": BAD}]
    assert 0.9 < fields["seconds"] < 20


def test_a_dense_model_and_no_server_are_said_to_be_so():
    with server_thread(ScriptedEngine()) as address:
        dense = run("inspect", "--expert-load", "--server", address)
    assert dense.exit_code == 1 and f"fake at {address} has no experts" in dense.stderr
    gone = run("inspect", "--expert-load", "--server", address)
    assert gone.exit_code == 1 and f"no server answers at {address}" in gone.stderr


def test_a_server_that_began_again_is_no_difference():
    with pytest.raises(typer.Exit):
        since(response(BAD, seconds=9.0), response(EVEN, seconds=2.0))
    assert since(response(EVEN, seconds=2.0), response(BAD, seconds=3.5)).time == 1.5


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("demo", "--expert-load"),
        ("--expert-load", "--device-memory", "1GiB"),
        ("demo", "--server", "localhost:1"),
        ("demo", "--over", "3"),
        ("--over", "3"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(args):
    result = run("inspect", *args)
    assert result.exit_code == 2 and "--expert-load" in words(result)
