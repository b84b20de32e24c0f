"""Pages leave the pool for host memory and come back with every bit; so do whole sequences."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import TINY, VOCAB, request, tiny_params

from jaxinfer.compile_watch import CompileWatch
from jaxinfer.config import EngineConfig
from jaxinfer.kv_pool import KVGroup, abstract_pools, empty_pools, kv_groups
from jaxinfer.page_transfer import BATCH, MOST_BATCHES, PageTransfer
from jaxinfer.programs import program_set
from jaxinfer.request import SamplingParams
from jaxinfer.runner import Runner
from jaxinfer.sequence import Sequence
from jaxinfer.sharding import make_mesh, pool_sharding
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from jaxinfer.startup import build_engine
from jaxinfer.step_model import StepModel
from jaxinfer.step_plan import MAX_PIECES, Piece, StepPlan

GROUPS = (
    KVGroup((0, 2), num_pages=30, page_size=4, kv_heads=2, head_dim=8, dtype="float32"),
    KVGroup((1,), num_pages=12, page_size=2, kv_heads=2, head_dim=8, dtype="bfloat16"),
    KVGroup((3,), num_pages=9, page_size=2, kv_heads=2, head_dim=8, dtype="int8"),
)
HOST_PAGES = (25, 6, 5)


@functools.cache
def transfer_programs(mesh=None, groups=GROUPS):
    """Compiled (read_pages, write_pages) by group, of the set that a start compiles."""
    place = None if mesh is None else pool_sharding(groups[0].layer_shape, mesh)
    state = (None, abstract_pools(groups, place), empty_slots(2, (4,) * len(groups)), None, None)
    model = StepModel(TINY, groups, "reference", mesh)
    compiled = {
        program.key: program.lower().compile()
        for program in program_set(model, (), state, offload=True)
        if program.name.split()[0] in ("read_pages", "write_pages")
    }
    pairs = [(compiled["read_pages", i], compiled["write_pages", i]) for i in range(len(groups))]
    assert len(compiled) == 2 * len(groups)
    return pairs


def random_pools(rng: np.random.Generator, groups=GROUPS, place=None):
    """Pools of random values, and copies of them in NumPy."""
    arrays = [
        tuple((9 * rng.normal(size=pool.shape)).astype(pool.dtype) for pool in pair)
        for pair in abstract_pools(groups)
    ]
    return jax.device_put(arrays, place), [tuple(a.copy() for a in pair) for pair in arrays]


def moves(data, group: int, ends: list[int], most: int) -> list[tuple[int, int, int]]:
    """Some pages of a group, each beside another host page of `ends`."""
    count = data.draw(st.integers(0, min(most, len(ends))))
    pages = data.draw(st.permutations(range(1, GROUPS[group].num_pages)))
    return list(zip([group] * count, pages, data.draw(st.permutations(ends))))


@settings(max_examples=40)
@given(data=st.data())
def test_pages_come_back_as_they_left(data):
    """Against a model in NumPy: any moves, host pages used again, landed early or late."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    pools, mirror = random_pools(rng)
    transfer, host = PageTransfer(GROUPS, HOST_PAGES, transfer_programs()), [{}, {}, {}]
    for step in range(data.draw(st.integers(2, 5))):
        plan = StepPlan(step)
        for group, count in enumerate(HOST_PAGES):
            plan.page_outs += moves(data, group, list(range(count)), 20)
            plan.page_ins += moves(data, group, sorted(host[group]), 20)
        plan.page_outs = data.draw(st.permutations(plan.page_outs))
        pools = transfer.dispatch(pools, plan)
        for group, page, where in plan.page_outs:
            host[group][where] = [
                [part[page].copy() for part in mirror[layer]] for layer in GROUPS[group].layers
            ]
        for group, page, where in plan.page_ins:
            for layer, pair in zip(GROUPS[group].layers, host[group][where]):
                for part, values in zip(mirror[layer], pair):
                    part[page] = values
        if data.draw(st.booleans()):
            transfer.land(step)
    for pair, expected in zip(pools, mirror):
        for pool, want in zip(pair, expected):
            np.testing.assert_array_equal(np.asarray(pool)[1:], want[1:])
            assert np.isfinite(np.asarray(pool[0], np.float32)).all(), "the null page"


def test_few_reads_are_on_their_way_at_once_and_land_when_their_step_does():
    pools, mirror = random_pools(np.random.default_rng(0))
    transfer = PageTransfer(GROUPS, (200, 1, 1), transfer_programs())
    most = 0
    for step in range(10):
        pages = [(0, 1 + (7 * step + i) % 29, 20 * step + i) for i in range(20)]
        pools = transfer.dispatch(pools, StepPlan(step, page_outs=pages))
        most = max(most, len(transfer._reads))
    assert most == MOST_BATCHES
    transfer.land(8)
    assert len(transfer._reads) == -(-20 // BATCH), "those of the last step"
    transfer.land(9)
    assert not transfer._reads
    for _, page, where in pages:
        np.testing.assert_array_equal(transfer._store[0][0][where, 1], mirror[2][0][page])


def test_pools_are_written_in_place_and_never_copied():
    groups = kv_groups(TINY, 4096, 16, "float32")
    ((read, write),) = transfer_programs(None, groups)
    pool_bytes, batch_bytes = 4096 * groups[0].page_bytes, BATCH * groups[0].page_bytes
    assert write.memory_analysis().alias_size_in_bytes >= pool_bytes
    for program in (read, write):
        assert program.memory_analysis().temp_size_in_bytes <= 2 * batch_bytes < pool_bytes / 100


def test_pages_of_a_pool_that_is_sharded():
    mesh = make_mesh(jax.devices(), 2)
    place = pool_sharding(GROUPS[0].layer_shape, mesh)
    pools, mirror = random_pools(np.random.default_rng(1), place=place)
    transfer = PageTransfer(GROUPS, HOST_PAGES, transfer_programs(mesh))
    out = [(0, 1 + i, i) for i in range(11)] + [(2, 3, 0)]
    pools = transfer.dispatch(pools, StepPlan(0, page_outs=out))
    back = [(0, 29 - i, i) for i in range(11)] + [(2, 8, 0)]
    pools = transfer.dispatch(pools, StepPlan(1, page_ins=back))
    assert len(pools[3]) == 4 and all(pool.sharding == place for pool in pools[3])
    for pool, want in zip(pools[3], mirror[3]):
        np.testing.assert_array_equal(pool[8], want[3])
    for layer in (0, 2):
        for pool, want in zip(pools[layer], mirror[layer]):
            assert pool.sharding == place
            np.testing.assert_array_equal(pool[19:30][::-1], want[1:12])
            np.testing.assert_array_equal(pool[1:19], want[1:19])


# -- whole sequences -------------------------------------------------------------------------------

PAGE_SIZE, WIDTH, SLOTS = 16, 8, 10
CONFIG = EngineConfig(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=64,
    page_size=PAGE_SIZE,
    kv_pool_bytes=50 * kv_groups(TINY, 1, PAGE_SIZE, "float32")[0].page_bytes,
    kv_offload_bytes=20 * kv_groups(TINY, 1, PAGE_SIZE, "float32")[0].page_bytes + 5,
)
OPTIONS = {
    "greedy": SamplingParams(temperature=0, logprobs=5),
    "drawn": SamplingParams(temperature=1.0, top_p=0.9, logprobs=5),
    "penalised": SamplingParams(
        temperature=0, frequency_penalty=0.9, repetition_penalty=1.3, logprobs=5
    ),
}


@functools.cache
def built():
    engine = build_engine(
        types.SimpleNamespace(config=TINY, params=tiny_params(), tokenizer=None), CONFIG
    )
    engine.compiles.close()
    return engine


def fresh_runner() -> Runner:
    runner = built().runner
    state = (
        runner.params,
        empty_pools(kv_groups(TINY, runner.pools[0][0].shape[0], PAGE_SIZE, "float32")),
        empty_slots(SLOTS, (WIDTH,)),
        empty_options(SLOTS, VOCAB),
        empty_history(SLOTS, VOCAB),
    )
    transfer = runner.transfer
    pairs = [(runner.programs.read_pages[0], runner.programs.write_pages[0])]
    transfer = PageTransfer(transfer.groups, transfer.host_pages, pairs)
    return Runner(runner.programs, SLOTS, state, transfer)


class Hand:
    """Plans made by hand for a runner, the last one always in flight, as the engine does it."""

    def __init__(self):
        self.runner, self.number, self.in_flight = fresh_runner(), 0, []
        self.bits: dict[str, list[bytes]] = {}

    def step(self, **plan):
        plan = StepPlan(self.number, **plan)
        self.in_flight.append((plan, self.runner.dispatch(plan)))
        self.number += 1
        if len(self.in_flight) == 2:
            self.read()

    def read(self):
        plan, handle = self.in_flight.pop(0)
        result = self.runner.collect(handle)
        for row, sequence in plan.sampled():
            sequence.tokens.append(result.tokens[row])
            bits = result.logprobs[row].tobytes()
            self.bits.setdefault(sequence.request.id, []).append(bits)


def sequence(name: str, slot: int, pages: list[int], length: int, params) -> Sequence:
    prompt = np.random.default_rng(len(name)).integers(0, VOCAB, length)
    made = Sequence(request(name, prompt, 60, params, seed=7), tokens=prompt.tolist())
    made.slot, made.pages = slot, [pages]
    return made


def start(hand: Hand, one: Sequence, decodes=()) -> None:
    piece = Piece(one, 0, one.prompt_len, last=True)
    hand.step(decodes=list(decodes), pieces=[piece], admitted=[one])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sequence_goes_on_where_it_was_when_its_pages_come_back(name):
    """In another slot, at other pages, after others had its own: every bit of its logprobs."""
    straight, hand = Hand(), Hand()
    for driver, interrupted in ((straight, False), (hand, True)):
        company = sequence("company", 6, [30, 31, 32, 33, 34], 20, OPTIONS["greedy"])
        it = sequence("it", 0, [1, 2, 3, 4, 5], 40, OPTIONS[name])
        start(driver, company)
        start(driver, it, [company])
        for _ in range(10):
            driver.step(decodes=[company, it])
        if interrupted:
            out = [(0, page, 19 - i) for i, page in enumerate(it.pages[0])]
            taker = sequence("the taker", 0, [1, 2, 3, 4, 5], 60, OPTIONS["drawn"])
            piece = Piece(taker, 0, 60, last=True)
            # Its last step is still in flight when its pages go and others come to use them.
            driver.step(decodes=[company], pieces=[piece], admitted=[taker], page_outs=out)
            for _ in range(4):
                driver.step(decodes=[company, taker])
            it.slot, it.pages = 3, [[40, 2, 41, 1, 42]]
            back = [(0, page, 19 - i) for i, page in enumerate(it.pages[0])]
            moves = {"admitted": [it], "resumed": [it], "page_ins": back}
            driver.step(decodes=[company, it], **moves)
        for _ in range(9 if interrupted else 10):
            driver.step(decodes=[company, it])
        driver.read()
    assert len(straight.bits["it"]) == len(hand.bits["it"]) == 21
    assert hand.bits["it"] == straight.bits["it"]


def test_more_sequences_resume_at_once_than_one_admission_holds():
    """And nothing compiles."""
    assert SLOTS > MAX_PIECES
    hand, watch = Hand(), CompileWatch(guard=True)
    watch.ready()
    try:
        every = [
            sequence("x" * i, i, [1 + 2 * i, 2 + 2 * i], 9, OPTIONS["greedy"]) for i in range(SLOTS)
        ]
        for one in every:
            start(hand, one)
        hand.read()
        tokens = [list(one.tokens) for one in every]
        hand.step(decodes=every)
        hand.read()
        expected, hand.bits = {name: bits[-1] for name, bits in hand.bits.items()}, {}
        for one, known in zip(every, tokens):
            one.tokens = known
            one.slot = SLOTS - 1 - one.slot
        hand.step(decodes=every, admitted=every, resumed=every)
        hand.read()
        assert hand.bits == {name: [bits] for name, bits in expected.items()}
    finally:
        watch.close()


def test_host_memory_holds_whole_pages_of_every_group():
    engine = built()
    assert engine.runner.transfer.host_pages == (20,)
    store = engine.runner.transfer._store
    assert (
        engine.memory.host_bytes
        == sum(part.nbytes for parts in store for part in parts)
        < CONFIG.kv_offload_bytes
    )
    assert "offloading: " in "\n".join(engine.memory.lines(engine.runner.transfer.groups, 128))
    assert [part.dtype for part in store[0]] == [jnp.float32] * 2
