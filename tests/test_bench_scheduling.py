"""Ladder, prefix, pages and scheduler: their arithmetic by hand, over engines that check it."""

from __future__ import annotations

import itertools
import json

import pytest
from fakes import POISON, FakeRunner, scheduler_limits
from test_families import family_folder
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.bench import setup
from jaxinfer.bench.cli import app
from jaxinfer.bench.drive import drive, drive_feed
from jaxinfer.bench.feeds import Chats, Reserving, Waves
from jaxinfer.bench.ladder import LADDER
from jaxinfer.bench.pages import Memory, compare_reservations
from jaxinfer.bench.prefix import GUIDE, Sizes, compare, make_load, shared_hits, warm_up
from jaxinfer.bench.scheduler_cost import requests, scheduler_times
from jaxinfer.bench.variants import running_as
from jaxinfer.bench.workload import WorkItem, make_workload
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.policy import SchedulerLimits, SchedulerPolicy
from jaxinfer.scheduler import Scheduler
from jaxinfer.validation import EngineLimits


def fake_engine(
    max_model_len: int = 400, slots: int = 4, chunk: int = 32, page_size: int = 4, pages: int = 1200
) -> Engine:
    """The engine of the model whose tokens depend on what really lies in the pages."""
    limits = scheduler_limits(slots, chunk, page_size, (pages,))
    return Engine(
        Scheduler(limits),
        FakeRunner(limits, max_model_len),
        EngineLimits(POISON, max_model_len, slots, max_model_len, 1000, 100_000),
    )


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_workload("synthetic", 1, length, 1, POISON, length + 1, seed)[0].prompt


# -- feeds -------------------------------------------------------------------------------------


def ends(*numbers: int) -> list[tuple[int, list[int]]]:
    return [(number, []) for number in numbers]


def test_a_wave_follows_when_all_of_the_one_before_it_ended():
    items = [WorkItem((i,), 1) for i in range(5)]
    feed = Waves(items, 2)
    assert feed.total == 5
    assert feed.due(()) == items[:2]
    assert feed.due(ends(1)) == []
    assert feed.due(ends(0)) == items[2:4]
    assert feed.due(ends(2, 3)) == items[4:]
    assert feed.due(ends(4)) == []


def test_a_turn_repeats_all_that_was_said():
    feed = Chats([[WorkItem((1, 2), 3), WorkItem((3,), 4)], [WorkItem((7,), 1)]])
    assert feed.total == 3
    assert feed.due(()) == [WorkItem((1, 2), 3), WorkItem((7,), 1)]
    assert feed.due([(1, [8])]) == []  # that conversation is over
    assert feed.due([(0, [9, 9, 9])]) == [WorkItem((1, 2, 9, 9, 9, 3), 4)]
    assert feed.due([(2, [5, 5, 5, 5])]) == []


def test_reservations_are_given_in_order_and_come_back():
    items = [WorkItem((0,) * n, 1) for n in (3, 5, 1, 9)]
    feed = Reserving(items, 10, lambda item: len(item.prompt) + item.output_len)
    assert feed.due(()) == items[:2]  # 4 + 6; the short one behind them waits for its turn
    assert feed.due(ends(0)) == items[2:3]
    assert feed.due(ends(1)) == []  # 2 of 10 are taken, and 10 are wanted
    assert feed.due(ends(2)) == items[3:]


def test_chats_through_an_engine_continue_their_own_answers():
    engine = fake_engine()
    turns = [[WorkItem(prompt(5, 10 * chat + turn), 3) for turn in range(3)] for chat in range(2)]
    run = drive_feed(engine, Chats(turns), 4)
    assert sorted(len(item.prompt) for item in run.items) == [5, 5, 13, 13, 21, 21]
    for number, item in enumerate(run.items):
        longer = [i.prompt for i in run.items if len(i.prompt) == len(item.prompt) + 8]
        said = item.prompt + tuple(run.outputs[number])
        assert not longer or said in [p[: len(said)] for p in longer]
    assert run.sent[0] <= run.first_token[0] <= run.ended[0] <= run.sent[-1]


# -- prefix ------------------------------------------------------------------------------------


def saved(engine: Engine, load) -> dict:
    warm_up(engine, load)
    return compare(engine, load, 2)


@pytest.mark.parametrize("page_size, prefix_len", [(4, 96), (4, 99), (16, 100)])
def test_what_a_shared_prefix_saves_is_its_full_pages(page_size, prefix_len):
    engine = fake_engine(page_size=page_size)
    sizes = Sizes(num_prompts=8, prefix_len=prefix_len, question_len=7, output_len=3)
    found = saved(engine, make_load("shared", sizes, POISON, 400, 0))
    total, full = 8 * (prefix_len + 7), prefix_len // page_size * page_size
    assert found["off"]["prefill_tokens"] == total
    assert found["on"]["prefill_tokens"] == total - 7 * full
    assert found["hit_rate"] == pytest.approx(7 * full / total)
    assert found["saved"] == pytest.approx(found["saved_by_arithmetic"])


@pytest.mark.parametrize("page_size", [8, 64])
def test_the_example_of_the_guides_saves_what_it_says(page_size):
    engine = fake_engine(page_size=page_size, chunk=512)
    found = saved(engine, make_load("guide", Sizes(output_len=4), POISON, 400, 0))
    count, prefix_len, question_len = GUIDE
    assert found["off"]["prefill_tokens"] == count * (prefix_len + question_len) == 750
    # 53% but for the part of the prefix that fills no page.
    rounding = (count - 1) * (prefix_len % page_size) / 750
    assert found["saved"] == pytest.approx(400 / 750 - rounding)
    assert found["saved"] >= 0.53 - rounding
    assert found["saved"] == pytest.approx(found["saved_by_arithmetic"])


def test_hits_leave_a_token_to_compute():
    assert shared_hits([8, 8, 9], shared=8, page_size=4) == 4 + 8
    assert shared_hits([5], shared=4, page_size=4) == 0


def test_a_conversation_finds_all_full_pages_of_what_was_said():
    engine = fake_engine()
    sizes = Sizes(num_chats=3, turns=4, turn_len=6)
    found = saved(engine, make_load("chat", sizes, POISON, 400, 0))
    # A turn adds 12 tokens; the KV of an answer's last token was never computed.
    hits = 3 * sum((12 * turn - 1) // 4 * 4 for turn in (1, 2, 3))
    assert found["on"]["prefix_hits"] == hits
    assert found["num_requests"] == 12
    assert found["on"]["prefill_tokens"] == found["off"]["prefill_tokens"] - hits


def test_unrelated_requests_hit_nothing_and_conversations_fit_the_model():
    engine = fake_engine()
    sizes = Sizes(num_chats=2, turns=5, scale=0.05)
    found = saved(engine, make_load("unrelated", sizes, POISON, 200, 0))
    assert (found["hit_rate"], found["saved"]) == (0.0, 0.0)
    chats = saved(engine, make_load("sharegpt", sizes, POISON, 200, 0))
    assert chats["num_requests"] <= 10
    assert chats["hit_rate"] > 0.3


def test_a_prefix_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="more than the 1000"):
        make_load("shared", Sizes(), POISON, 1000, 0)
    with pytest.raises(ValueError, match="choose among shared"):
        make_load("poems", Sizes(), POISON, 1000, 0)


# -- pages -------------------------------------------------------------------------------------


def test_requests_at_once_by_hand():
    # Prompts of 8 and outputs of 8 in pages of 4: 16 tokens each at the end.
    memory = Memory(tokens=64, page_size=4, max_model_len=32, num_slots=50, chunk_tokens=1000)
    items = [WorkItem(prompt(8, n), 8) for n in range(12)]
    found = {entry["way"]: entry for entry in compare_reservations(memory, items)}
    assert found["max_model_len"]["most_at_once"] == 64 // 32
    assert found["power of two"]["most_at_once"] == found["own length"]["most_at_once"] == 64 // 16
    assert 64 // 16 < found["paged"]["most_at_once"] <= 64 // 8
    assert found["paged"]["steps"] <= found["own length"]["steps"]
    assert found["own length"]["steps"] < found["max_model_len"]["steps"]
    assert found["max_model_len"]["paged_to_this"] > 2
    assert found["paged"]["paged_to_this"] == 1


def test_a_request_over_a_power_of_two_reserves_the_next():
    memory = Memory(tokens=64, page_size=4, max_model_len=64, num_slots=50, chunk_tokens=1000)
    items = [WorkItem(prompt(8, n), 9) for n in range(6)]
    found = {entry["way"]: entry for entry in compare_reservations(memory, items)}
    assert found["power of two"]["most_at_once"] == 64 // 32
    assert found["own length"]["most_at_once"] == 64 // 17


def test_windows_leave_room_for_more_requests_in_the_same_memory():
    """A layer that sees all and one of a window: 640 pages of both, or 960 and 320 of each."""
    items = [WorkItem(prompt(200, n), 24) for n in range(40)]
    memory = Memory(2560, 4, 256, 50, chunk_tokens=256, groups=((961, None), (321, 8)))
    found = {entry["way"]: entry for entry in compare_reservations(memory, items)}
    assert [*found][:2] == ["paged", "no windows"]
    assert found["paged"]["steps"] < found["no windows"]["steps"]
    assert found["no windows"]["paged_to_this"] > 1.3
    whole = 640 // 56  # with all 224 tokens
    assert whole <= found["no windows"]["most_at_once"] < found["paged"]["most_at_once"]
    without = Memory(2560, 4, 256, 50, chunk_tokens=256)
    assert compare_reservations(without, items)[0]["steps"] == found["no windows"]["steps"]


# -- scheduler ---------------------------------------------------------------------------------


def test_the_queue_keeps_its_length_and_slots_are_full():
    limits = SchedulerLimits(8, 1024, 16, (2000,))
    found = scheduler_times(limits, SchedulerPolicy(), waiting=30, warm_up=40, steps=60, seed=0)
    assert found["waiting"] == 30
    assert found["rows"] > 6
    assert 0 < found["plan_ms"]["median"] <= found["step_ms"]["median"]
    assert sum(found["pages"].values()) == 1999


def test_tenants_priorities_and_prefixes_are_mixed():
    some = list(itertools.islice(requests(0), 200))
    assert len({request.scheduling.tenant for request in some}) == 16
    assert {request.scheduling.priority for request in some} == {0, 1, 2}
    beginnings = [request.prompt[:512] for request in some if len(request.prompt) > 512]
    assert len(set(beginnings)) < len(beginnings) - 50


# -- commands ----------------------------------------------------------------------------------


def bench(*arguments: str) -> dict:
    """A bench command's JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = hf_folder(tmp_path_factory.mktemp("tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return str(folder)


ENGINE = {
    "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_pool_bytes": 16_000_000, "page_size": 16,
}  # fmt: skip
SMALL = (  # the same, as options
    "--dtype", "float32", "--max-num-batched-tokens", "64", "--kv-cache-memory", "16000000",
    "--page-size", "16", "--concurrency", "2", "--rounds", "1",
)  # fmt: skip


def test_the_ladder_of_a_tiny_model(model):
    sizes = ("--num-prompts", "5", "--length-scale", "0.01", "--prefix-len", "32")
    result = bench("ladder", model, *sizes, *SMALL)
    assert [rung["rung"] for rung in result["rungs"]] == [rung.name for rung in LADDER]
    assert result["batching"]["bound"] > 1
    assert result["compiles_after_ready"] == 0
    assert result["length_scale"] == 0.01


def test_rungs_of_kinds_have_engines_of_their_own(model):
    sizes = ("--num-prompts", "3", "--length-scale", "0.01", "--prefix-len", "32", "--rounds", "1")
    result = bench("ladder", model, *sizes, *SMALL, "--rungs", "prefix,w8a8+kv-int8")
    plain, both = result["rungs"]
    assert (plain["rung"], both["rung"]) == ("prefix", "w8a8+kv-int8")
    assert both["title"] == "+ weights w8a8, KV int8" and both["output_tokens_per_second"] > 0
    assert result["compiles_after_ready"] == 0


def test_a_static_batch_keeps_its_size_to_the_end(model):
    engine = setup.start(model, EngineConfig(**ENGINE), "float32").engine
    items = [WorkItem(prompt(5, 1), 6), WorkItem(prompt(5, 2), 3)]
    seen = []
    dispatch = engine.runner.dispatch
    engine.runner.dispatch = lambda *given: seen.append(dispatch(*given)) or seen[-1]
    for full_batch in (True, False):
        with running_as(engine, SchedulerPolicy(prefix_cache=False), full_batch):
            drive_feed(engine, Waves(items, 2), 2)
    rows = [step.shape.rows for step in seen if not step.shape.chunk]
    assert (rows[:5], rows[5:]) == ([2, 2, 2, 2, 2], [2, 2, 1, 1, 1])


def test_prefixes_of_a_tiny_model(model):
    sizes = ("--num-prompts", "4", "--prefix-len", "40", "--question-len", "5", "--output-len", "3")
    chats = ("--chats", "2", "--turns", "3", "--turn-len", "10", "--length-scale", "0.02")
    result = bench("prefix", model, *sizes, *chats, *SMALL)
    assert [load["load"] for load in result["loads"]] == [
        "shared", "guide", "chat", "sharegpt", "unrelated",
    ]  # fmt: skip
    for load in result["loads"][:2]:
        assert load["saved"] == pytest.approx(load["saved_by_arithmetic"])
    assert result["loads"][2]["hit_rate"] > 0.3
    assert result["compiles_after_ready"] == 0


def test_pages_of_a_tiny_model(model):
    sizes = ("--kv-cache-memory", "2000000", "--max-model-len", "256", "--num-prompts", "40")
    result = bench("pages", model, *sizes, "--page-size", "16")
    # 2 layers, keys and values of 2 heads of 16 numbers, 2 bytes each: 256 bytes a token.
    assert result["kv_tokens"] == 2_000_000 // (256 * 16) * 16
    assert [way["way"] for way in result["ways"]] == [
        "paged", "max_model_len", "power of two", "own length",
    ]  # fmt: skip


def test_pages_of_a_tiny_model_with_windows(tmp_path):
    sizes = ("--kv-cache-memory", "200000", "--num-prompts", "20", "--page-size", "4")
    lengths = ("--dataset", "synthetic", "--input-len", "40", "--output-len", "8")
    folder = str(family_folder(tmp_path, "gemma3_text"))
    result = bench("pages", folder, *sizes, *lengths, "--max-num-batched-tokens", "16")
    assert [window for _, window in result["groups"]] == [None, 8]
    assert [way["way"] for way in result["ways"]][:2] == ["paged", "no windows"]


def test_the_cost_of_scheduling():
    sizes = ("--max-num-seqs", "4", "--waiting", "5,20", "--pages", "1000")
    result = bench("scheduler", *sizes, "--steps", "20", "--warm-up", "5")
    assert [run["waiting"] for run in result["runs"]] == [5, 20]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("ladder", "demo", "--rungs", "one,ten"), "choose among one, static"),
        (("ladder", "demo", "--input-len", "3"), "draws its own"),
        (("scheduler", "--waiting", "many"), "write numbers"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_arguments_that_do_not_fit_the_model_are_named(model):
    for arguments, said in (
        (("ladder", model, *SMALL, "--prefix-len", "511"), "--prefix-len is 511"),
        (("ladder", model, *SMALL, "--length-scale", "2"), "--length-scale is 2.0"),
        (("prefix", model, *SMALL), "more than the 512"),
        (("pages", model, "--kv-cache-memory", "9999"), "--kv-cache-memory 9999 holds 0"),
    ):
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())


def test_drive_is_a_feed_of_everything_at_once():
    items = [WorkItem(prompt(5, n), 2) for n in range(3)]
    run = drive(fake_engine(), items, 3)
    assert run.items == items
    assert max(run.sent) <= min(run.first_token.values())
    assert [t > 0 for t in run.tpots] == [True] * 3
