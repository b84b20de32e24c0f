"""Every family through the paged step: chunked prefill, decode and company equal the dense loop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import MOST_MAPPINGS, forget_programs
from test_families import ORACLE_FAMILIES, family_folder, oracle
from tiny_checkpoint import dense_logits

from jaxinfer import programs, startup
from jaxinfer.checkpoints import load_model
from jaxinfer.config import EngineConfig
from jaxinfer.kv_pool import kv_groups, least_pages
from jaxinfer.request import Request, SamplingParams, Submit


@pytest.fixture(autouse=True)
def room_for_each_familys_programs():
    yield
    forget_programs(MOST_MAPPINGS)


PARAMS = SamplingParams(temperature=0, logprobs=5)
SCORED = SamplingParams(temperature=0, prompt_logprobs=1)
LENGTHS = (40, 3, 17, 25)  # longer than the window, shorter, split by the chunk
PADDED = 60
# Those that another family has all features of: they differ in names and defaults alone.
ALIKE = {"arcee", "dots1", "ernie4_5", "gemma", "glm", "opt", "seed_oss"}


def scores(engine, prompts: list[list[int]]) -> list[list]:
    """Logprobs of each prompt's tokens but the first, all at once; nothing is generated."""
    found: dict[str, list] = {}
    for i, prompt in enumerate(prompts):
        found[str(i)] = []
        engine.execute(Submit(Request(str(i), tuple(prompt), SCORED, 0, 0)), 0.0)
    while engine.has_work:
        for event in engine.step(0.0):
            found[event.request_id] += event.prompt_logprobs or ()
    return list(found.values())


def continuations(engine, prompts: list[list[int]], count: int) -> list[tuple[list, list]]:
    """Greedy tokens and logprobs of each prompt, all at once."""
    outputs: dict[str, tuple[list, list]] = {}
    for i, prompt in enumerate(prompts):
        outputs[str(i)] = ([], [])
        engine.execute(Submit(Request(str(i), tuple(prompt), PARAMS, count, 0)), 0.0)
    while engine.has_work:
        for event in engine.step(0.0):
            outputs[event.request_id][0].extend(event.tokens)
            outputs[event.request_id][1].extend(event.logprobs)
        engine.scheduler.check_invariants()
    return list(outputs.values())


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("family", sorted({*ORACLE_FAMILIES} - ALIKE))
def test_the_paged_step_equals_the_dense_loop(family, tmp_path, monkeypatch):
    # Of the programs, what takes part in every step here: fewer to compile.
    monkeypatch.setattr(programs, "VARIANTS", ("greedy", "full"))
    monkeypatch.setattr(programs, "row_rungs", lambda rows: (rows,))
    model = load_model(family_folder(tmp_path, family), dtype="float32")
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=16, page_size=4, kv_pool_bytes=1 << 20
    )
    engine = startup.build_engine(model, config)
    engine.compiles.close()
    tokens, _ = oracle(family)
    prompts = [tokens[:length].tolist() for length in LENGTHS]
    for attempt in ("cold", "with prefix hits"):
        outputs = continuations(engine, prompts, 20)
        for prompt, (said, logprobs) in zip(prompts, outputs):
            whole = np.array([*prompt, *said])
            padded = np.pad(whole, (0, PADDED - len(whole)))  # one shape: compiled once
            logits = dense_logits(model.config, model.params, padded)[: len(whole)]
            lines = logits[len(prompt) - 1 : -1].astype(np.float64)
            exact = lines - np.log(np.exp(lines).sum(-1, keepdims=True))
            scale = np.abs(lines).max()
            for token, found, line in zip(said, logprobs, exact):
                assert line.max() - line[token] <= 1e-4 * scale, attempt
                assert abs(found.logprob - line[token]) <= 1e-4 * scale, attempt
    assert engine.counters.prefix_hits > 0
    logits = dense_logits(model.config, model.params, np.pad(tokens[:40], (0, PADDED - 40)))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1))[:, None]
    for prompt, lines in zip(prompts, scores(engine, prompts)):
        following = prompt[1:]  # all prompts are beginnings of the longest
        expected = exact[np.arange(len(following)), following]
        found = [line.logprob for line in lines]
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(logits).max())
    windows = {kind.window for kind in model.config.kinds}
    assert len(engine.scheduler.allocators) == max(1, len(windows))


@pytest.mark.usefixtures("quick_compiler")
def test_prompts_far_longer_than_a_windows_pool_say_what_they_say_in_a_roomy_one(
    tmp_path, monkeypatch
):
    """Divided alike, as for layers that keep everything, the pool would not hold one of them."""
    monkeypatch.setattr(programs, "VARIANTS", ("greedy", "full"))
    monkeypatch.setattr(programs, "row_rungs", lambda rows: (rows,))
    model = load_model(family_folder(tmp_path, "gemma3_text"), dtype="float32")
    longest = 512
    model = dataclasses.replace(
        model, config=dataclasses.replace(model.config, max_position=longest)
    )
    groups = kv_groups(model.config, 1, 4, "float32")
    least = least_pages(groups, longest, 16)
    bytes_of_one = sum(pages * group.page_bytes for pages, group in zip(least, groups))
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, page_size=4)
    prompts = np.random.default_rng(1).integers(0, 96, (3, 300)).tolist()
    outputs = []
    for pool in (8 * bytes_of_one, bytes_of_one):
        tight = dataclasses.replace(config, kv_pool_bytes=pool)
        engine = startup.build_engine(model, tight)
        engine.compiles.close()
        first = continuations(engine, prompts, 12)
        assert continuations(engine, prompts[-1:], 12)[0][0] == first[-1][0]
        assert engine.counters.prefix_hits > 0
        outputs.append(first)
    assert engine.scheduler.limits.num_pages == least
    whole, window = least
    assert pool // sum(group.page_bytes for group in groups) < longest // 4 + 1 == whole
    assert 4 * (window - 1) < 100 < engine.limits.kv_tokens
    for (tokens, logprobs), (again, others) in zip(*outputs):
        assert tokens == again
        found = [line.logprob for line in others]
        np.testing.assert_allclose(found, [line.logprob for line in logprobs], atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_deterministic_engines_of_windows_and_experts_give_the_same_bits(family, tmp_path):
    """Alone, in company, after a prefix hit and after a preemption."""
    model = load_model(family_folder(tmp_path, family), dtype="float32")
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=16, page_size=4, deterministic=True
    )
    roomy = dataclasses.replace(config, kv_pool_bytes=1 << 20)
    tokens, _ = oracle(family)
    prompts = [tokens[:length].tolist() for length in LENGTHS]
    alone = []
    for prompt in prompts:
        engine = startup.build_engine(model, roomy)
        engine.compiles.close()
        alone += continuations(engine, [prompt], 20)
    for _ in range(2):
        assert continuations(engine, prompts, 20) == alone
    assert engine.counters.prefix_hits > 0
    groups = kv_groups(model.config, 1, 4, "float32")
    tight = dataclasses.replace(config, kv_pool_bytes=20 * sum(g.page_bytes for g in groups))
    engine = startup.build_engine(model, tight)
    engine.compiles.close()
    assert continuations(engine, prompts, 20) == alone
    assert engine.counters.preemptions > 0


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2_moe"])
def test_two_devices_give_what_one_gives(family, tmp_path):
    model = load_model(family_folder(tmp_path, family), dtype="float32")
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=16, page_size=4, kv_pool_bytes=1 << 20
    )
    tokens, _ = oracle(family)
    prompts = [tokens[:length].tolist() for length in LENGTHS]
    outputs, scored = [], []
    for devices in (1, 2):
        engine = startup.build_engine(
            model, dataclasses.replace(config, tensor_parallel_size=devices)
        )
        engine.compiles.close()
        outputs.append(continuations(engine, prompts, 12))
        scored.append([line.logprob for lines in scores(engine, prompts) for line in lines])
    np.testing.assert_allclose(*scored, atol=1e-3)
    for (one, one_logprobs), (two, two_logprobs) in zip(*outputs):
        assert one == two
        found = [line.logprob for line in two_logprobs]
        np.testing.assert_allclose(found, [line.logprob for line in one_logprobs], atol=1e-3)
