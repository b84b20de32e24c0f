"""What /metrics says: vLLM's families, exact after every kind of end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

import numpy as np
import openai
import pytest
from fake_engine import LONG, ScriptedEngine, echo, forever, says
from jaxinfer_service.metrics.collector import Metrics
from jaxinfer_service.metrics.histograms import Histogram, token_buckets
from jaxinfer_service.server import CHECK_SECONDS
from prometheus_client.parser import text_string_to_metric_families
from serving import in_loop, until
from test_http import http

from jaxinfer.expert_load import ExpertLoad
from jaxinfer.load import StepRecord


async def scrape(plain) -> dict[tuple, float]:
    """Every sample of /metrics by its name and labels, but those that all have."""
    text = (await plain.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, *labels.values()] = sample.value
    return found


def test_a_histogram_counts_by_upper_ends():
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 7, None):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("5.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 15


def test_token_buckets_end_at_the_models_length():
    assert token_buckets(64) == (1, 2, 5, 10, 20, 50)
    assert token_buckets(8192)[-1] == 5000


@in_loop
async def test_families_have_the_names_and_labels_of_vllm():
    async with http(ScriptedEngine(says("abc")), metrics_prefix="vllm") as (plain, client):
        await client.completions.create(model="fake", prompt="xyz")
        text = (await plain.get("/metrics")).text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "gpu_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total",
        "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "time_to_first_token_seconds_sum", "inter_token_latency_seconds_count",
        "time_per_output_token_seconds_count", "request_time_per_output_token_seconds_count",
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
        "request_inference_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_prompt_tokens_sum",
        "request_generation_tokens_sum", "request_max_num_generation_tokens_sum",
        "request_params_max_tokens_sum", "request_params_n_sum", "iteration_tokens_total_count",
        "request_prefill_kv_computed_tokens_sum", "prompt_tokens_cached_total",
    ):  # fmt: skip
        assert f'vllm:{name}{{engine="0",model_name="fake"}}' in text, name
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="fake"}' in text
    kinds = 'dtype="float32",engine="0",model_name="fake",quantization="none"'
    assert f"vllm:model_config_info{{{kinds}" in text and 'cache_dtype="float32"' in text
    waiting = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="fake",reason='
    assert f'{waiting}"capacity"}} 0.0' in text and f'{waiting}"deferred"}} 0.0' in text
    assert 'le="0.001"' in text and 'vllm:cache_config_info{block_size="16"' in text


@in_loop
async def test_those_that_wait_are_counted_by_why_they_do():
    engine = ScriptedEngine(forever, dataclasses.replace(LONG, max_num_seqs=1))
    async with http(engine) as (plain, client):
        asked = {"model": "fake", "prompt": "a", "max_tokens": 30_000}
        calls = [asyncio.ensure_future(client.completions.create(**asked)) for _ in range(4)]
        await until(lambda: len(engine.waiting) == 3)
        engine.deferred = 1
        found = await scrape(plain)
        for call in calls:
            call.cancel()
    name = "jaxinfer:num_requests_waiting_by_reason"
    by_reason = [found[name, reason] for reason in ("capacity", "deferred", "preempted")]
    assert by_reason == [2, 1, 0] and found["jaxinfer:num_requests_waiting",] == 3


@in_loop
async def test_a_request_is_counted_once_in_every_family():
    engine = ScriptedEngine(says("abc"))
    engine.cached = lambda request: 1
    engine.records.append(StepRecord(0, 0.0, 1, 0, 2, 30, 1, 0, 0, 0, 0))
    async with http(engine) as (plain, client):
        before = await scrape(plain)
        await client.completions.create(model="fake", prompt="xy", n=2, max_tokens=3)
        found = await scrape(plain)
        again = await scrape(plain)
    gained = {key: value - before.get(key, 0) for key, value in found.items()}
    assert gained["jaxinfer:request_success_total", "length"] == 2
    assert gained["jaxinfer:request_prompt_tokens_sum",] == 4
    assert gained["jaxinfer:request_prefill_kv_computed_tokens_sum",] == 2
    assert gained["jaxinfer:prompt_tokens_by_source_total", "local_compute"] == 2
    assert gained["jaxinfer:prompt_tokens_by_source_total", "local_cache_hit"] == 2
    assert gained["jaxinfer:prompt_tokens_cached_total",] == 2
    assert gained["jaxinfer:request_generation_tokens_sum",] == 6
    assert gained["jaxinfer:request_params_max_tokens_sum",] == 6
    assert gained["jaxinfer:request_params_n_sum",] == 2
    assert gained["jaxinfer:request_params_n_count",] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert gained[f"jaxinfer:{name}_seconds_count",] == 2
    assert gained["jaxinfer:inter_token_latency_seconds_count",] == 4
    assert gained["jaxinfer:requests_received_total",] == 2
    assert before["jaxinfer:iteration_tokens_total_sum",] == 32
    steps = ("jaxinfer:iteration_tokens_total_sum",)
    assert found[steps] > 32 and again[steps] == found[steps], "a step is counted once"
    assert found["jaxinfer:pages", "free"] == 7 and found["jaxinfer:slots",] == 2


@in_loop
async def test_steps_count_however_seldom_somebody_asks():
    """The engine forgets old ones."""
    engine = ScriptedEngine(echo)
    async with http(engine) as (plain, _):
        for step in range(3):
            engine.records = deque([StepRecord(step, 0.0, 1, 0, 5, 0, 0, 0, 0, 0, 0)], maxlen=1)
            await asyncio.sleep(3 * CHECK_SECONDS)
        assert (await scrape(plain))["jaxinfer:iteration_tokens_total_sum",] == 15


@in_loop
async def test_who_leaves_is_counted_as_aborted_with_what_it_came_to():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.01)
    async with http(engine) as (plain, client):
        stream = await client.completions.create(
            model="fake", prompt="x", max_tokens=30_000, stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: not engine.running)
        found = await scrape(plain)
        assert found["jaxinfer:request_success_total", "abort"] == 1
        assert found["jaxinfer:e2e_request_latency_seconds_count",] == 1
        assert found["jaxinfer:time_to_first_token_seconds_count",] == 1
        assert 1 <= found["jaxinfer:request_generation_tokens_sum",] < 30_000


@in_loop
async def test_refused_requests_are_counted_and_reach_no_histogram():
    engine = ScriptedEngine(echo)
    async with http(engine) as (plain, client):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="fake", prompt="x" * 90)
        engine.late = "it comes too late"  # as a deadline says
        with pytest.raises(openai.APIStatusError):
            await client.completions.create(model="fake", prompt="x", extra_body={"timeout": 5})
        engine.gate.clear()  # nobody leaves the queue, which has room for four
        calls = [
            asyncio.create_task(client.completions.create(model="fake", prompt="x"))
            for _ in range(5)
        ]
        (refused,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(openai.RateLimitError):
            await refused
        engine.gate.set()
        await asyncio.gather(*calls, return_exceptions=True)
        found = await scrape(plain)
    for reason, count in {"invalid": 1, "late": 1, "queue_full": 1, "unavailable": 0}.items():
        assert found["jaxinfer:requests_refused_total", reason] == count
    assert found["jaxinfer:e2e_request_latency_seconds_count",] == 4, "those that were answered"
    ended = [n for (name, *_), n in found.items() if name == "jaxinfer:request_success_total"]
    assert sum(ended) == 4


@in_loop
async def test_health_and_experts_are_seen():
    engine = ScriptedEngine(echo)
    engine.experts = ExpertLoad((3,), 1, np.array([[6, 2]]))
    async with http(engine) as (plain, _):
        found = await scrape(plain)
        assert found["jaxinfer:healthy",] == 1
        assert found["jaxinfer:expert_imbalance", "3"] == 1.5
        assert found["jaxinfer:expert_tokens_total", "1", "3"] == 2
        engine.fail_with = RuntimeError("broken")
        with pytest.raises(Exception, match="503"):
            (await plain.post("/v1/completions", json={"prompt": "x"})).raise_for_status()
        await asyncio.sleep(0)
        assert (await scrape(plain))["jaxinfer:healthy",] == 0


def test_before_a_model_is_served_there_is_only_health():
    metrics = Metrics("x")
    assert b"x:healthy 0.0" in metrics.text() and b"num_requests" not in metrics.text()
    with pytest.raises(ValueError, match="prefix is 'a-b'"):
        Metrics("a-b")
