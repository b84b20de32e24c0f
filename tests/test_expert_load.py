"""Tokens counted by expert on the device, against the routing of a plain loop over the same."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from test_families import family_folder, oracle
from tiny_checkpoint import dense_attention, dense_logits
from tiny_engine import TINY, Setup, drive, engine_for, fresh, request

from jaxinfer import startup
from jaxinfer.checkpoints import LoadedModel, load_model
from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.expert_load import ExpertLoad, imbalance
from jaxinfer.models import family_of
from jaxinfer.request import Abort, FinishReason, Request, Submit

CONFIG = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, page_size=4, kv_pool_bytes=1 << 20, max_model_len=64
)
LONGEST = 64
# Prompt and output lengths: cut by the chunk, shorter than it, and ended while others go on.
LENGTHS = ((40, 3), (3, 20), (17, 1), (25, 9), (5, 2), (18, 12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """gpt-oss: two KV groups, four experts of which a token gets two, biases."""
    folder = tmp_path_factory.mktemp("experts")
    return load_model(family_folder(folder, "gpt_oss"), dtype="float32")


@pytest.fixture(scope="module")
def built(model: LoadedModel) -> Engine:
    engine = startup.build_engine(model, CONFIG)
    engine.compiles.close()
    return engine


def engine_on(built: Engine, model: LoadedModel, overlap: bool = True) -> Engine:
    engine = fresh(built, overlap)
    engine.experts = ExpertLoad.none_yet(model.config)
    return engine


def requests() -> list[Request]:
    tokens, _ = oracle("gpt_oss")
    return [
        request(str(i), tokens[i : i + prompt], outputs)
        for i, (prompt, outputs) in enumerate(LENGTHS)
    ]


def serve(engine: Engine, asked: list[Request]) -> dict[str, tuple[list[int], int]]:
    """What was said to each request, and how many tokens of its prompt were found."""
    said: dict[str, list[int]] = {each.id: [] for each in asked}
    found = dict.fromkeys(said, 0)
    for each in asked:
        engine.execute(Submit(each), 0.0)
    while engine.has_work:
        for event in engine.step(0.0):
            said[event.request_id] += event.tokens
            found[event.request_id] += event.cached_tokens
    return {name: (tokens, found[name]) for name, tokens in said.items()}


def routed(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """i32[layers, tokens, top_k]: the experts of each token of a sequence, by a plain loop."""
    c, family = model.config, family_of(model.config.family)
    padded = jnp.asarray(tokens + [0] * (LONGEST - len(tokens)), jnp.int32)  # one shape for all
    positions = jnp.arange(LONGEST, dtype=jnp.int32)
    context = family.layer_context(c, positions)
    x, experts = family.embed(model.params, c, padded, positions), []
    for i, layer in enumerate(model.params["layers"]):
        kind = c.kind(i)
        attend = functools.partial(dense_attention, c, kind.window)
        x = family.layer(layer, c, kind, x, context, attend, experts.append)
    return np.stack(experts)[:, : len(tokens)]


def expected(model: LoadedModel, asked: list[Request], answers: dict) -> np.ndarray:
    """Tokens that were computed: prompts but for what was found, and outputs but for the last."""
    counts = np.zeros((model.config.num_layers, model.config.moe.num_experts), np.int64)
    for each in asked:
        said, found = answers[each.id]
        for layer, experts in enumerate(routed(model, [*each.prompt, *said[:-1]])):
            counts[layer] += np.bincount(experts[found:].reshape(-1), minlength=counts.shape[1])
    return counts


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_counted_once_and_rows_that_compute_nothing_are_not(built, model, overlap):
    engine, asked = engine_on(built, model, overlap), requests()
    answers = serve(engine, asked)
    counts = expected(model, asked, answers)
    computed = sum(prompt + outputs - 1 for prompt, outputs in LENGTHS)
    assert counts.sum() == 2 * 2 * computed, "two experts a token in each of two layers"
    np.testing.assert_array_equal(engine.experts.tokens, counts)
    assert (engine.experts.layers, engine.experts.top_k) == ((0, 1), 2)
    # Some of it is in the prefix cache now; and what ends by itself is a row of the step after.
    asked = [dataclasses.replace(each, stop_ids=(answers[each.id][0][-1],)) for each in asked]
    asked = [dataclasses.replace(each, max_new_tokens=24) for each in asked]
    again = serve(engine, asked)
    assert sum(found for _, found in again.values()) > 0
    counts += expected(model, asked, again)
    np.testing.assert_array_equal(engine.experts.tokens, counts)


def test_padding_would_show(built, model):
    """The null token and idle rows do go to experts: what is counted is told apart from them."""
    engine = engine_on(built, model)
    serve(engine, requests()[1:2])
    shape = next(shape for shape in engine.runner.programs.forward if shape.chunk)
    assert shape.chunk >= 16 > LENGTHS[1][0] and routed(model, [0]).shape == (2, 1, 2)
    assert engine.experts.tokens.sum() == 2 * 2 * (LENGTHS[1][0] + LENGTHS[1][1] - 1)


def test_what_an_abort_leaves_in_flight_is_no_more_than_a_step(built, model):
    engine, (asked, *_) = engine_on(built, model), requests()
    engine.execute(Submit(asked), 0.0)
    engine.step(0.0)
    engine.execute(Abort(asked.id, FinishReason.CANCELLED), 0.0)
    while engine.has_work:
        engine.step(0.0)
    assert engine.experts.tokens.sum(1).tolist() == [2 * 16] * 2, "one chunk was computed"


def test_over_devices_and_with_determinism_it_is_the_same(built, model):
    """The router is whole on every device; what the self-check computes does not count."""
    config = dataclasses.replace(CONFIG, tensor_parallel_size=2, deterministic=True)
    engine = startup.build_engine(model, config)
    engine.compiles.close()
    assert engine.experts.tokens.sum() == 0
    asked = requests()
    answers = serve(engine, asked)
    np.testing.assert_array_equal(engine.experts.tokens, expected(model, asked, answers))
    for each in asked:
        said, _ = answers[each.id]
        sequence = np.zeros(LONGEST, np.int32)
        sequence[: len(each.prompt) + len(said)] = [*each.prompt, *said]
        lines = dense_logits(model.config, model.params, sequence)[len(each.prompt) - 1 :]
        chosen = lines[np.arange(len(said)), said]
        assert (lines[: len(said)].max(-1) - chosen < 1e-4 * np.abs(lines).max()).all()


def test_a_dense_model_counts_nothing():
    assert ExpertLoad.none_yet(TINY) is None
    engine = engine_for(Setup())
    drive(engine, [request("dense", range(9), 3)])
    assert engine.experts is None


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance(np.array([5, 5, 5, 5])) == 1.0
    assert imbalance(np.array([30, 10, 0, 0])) == 3.0
    assert imbalance(np.zeros(4, np.int64)) is None
    assert imbalance(np.array([2**40, 2**40 * 3])) == 1.5
