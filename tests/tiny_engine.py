"""Engines over a tiny random llama, compiled once a setup, and the naive loop they must equal."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sampler
from fake_engine import byte_tokenizer

from jaxinfer import determinism, startup
from jaxinfer.compile_watch import CompileWatch
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine import Engine
from jaxinfer.kv_pool import kv_groups
from jaxinfer.models import family_of
from jaxinfer.page_transfer import PageTransfer
from jaxinfer.params import init_params
from jaxinfer.quantization.quantise import quantise_params
from jaxinfer.request import (
    Abort,
    FinishReason,
    Request,
    SamplingParams,
    Submit,
    TokenLogprobs,
)
from jaxinfer.runner import Runner
from jaxinfer.scheduler import Scheduler
from jaxinfer.slot_state import empty_history, empty_options, empty_slots
from pallas_kernels.paged_attention import apply_rope

MAX_MODEL_LEN = 128
VOCAB = 300  # two draw blocks, the second one partial
TINY = ModelConfig("llama", VOCAB, 32, 64, 2, 4, 2, 16, max_position=MAX_MODEL_LEN)
GREEDY = SamplingParams(temperature=0)
TOLERANCE = 2e-5  # of logits and of running sums, between paged float32 and dense float32


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the compiled programs depend on."""

    slots: int = 8
    chunk: int = 32  # splits most prompts
    page_size: int = 16
    pages: int = 64  # nearly all slots at full length
    dtype: str = "float32"
    kv_dtype: str | None = None
    attention: str | None = None  # None: as a start chooses it
    sampling: str | None = None
    devices: int = 1
    deterministic: bool = False
    differs: bool = False  # some programs disagree: determinism is "fixed"
    host_pages: int = 0  # of preempted sequences
    prefix_cache: bool = True
    quantization: str = "none"

    def config(self, overlap: bool = True) -> EngineConfig:
        page_bytes = kv_groups(TINY, 1, self.page_size, self.kv_dtype or self.dtype)[0].page_bytes
        return EngineConfig(
            max_num_seqs=self.slots,
            max_num_batched_tokens=self.chunk,
            page_size=self.page_size,
            kv_pool_bytes=self.pages * page_bytes // self.devices,
            tensor_parallel_size=self.devices,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            overlap=overlap,
            deterministic=self.deterministic,
            kv_offload_bytes=self.host_pages * page_bytes,
            prefix_cache=self.prefix_cache,
            quantization=self.quantization,
        )


@functools.cache
def tiny_params(dtype: str = "float32", quantization: str = "none"):
    specs = family_of("llama").param_specs(TINY)
    params = init_params(specs, dtype, seed=3)
    return quantise_params(params, specs, quantization, dtype)


@functools.cache
def built(setup: Setup) -> Engine:
    """The engine as a start gives it. Do not run it: `engine_for` gives engines to run."""
    model = types.SimpleNamespace(
        config=TINY,
        params=tiny_params(setup.dtype, setup.quantization),
        tokenizer=byte_tokenizer(),
    )
    with pytest.MonkeyPatch.context() as patch:
        if setup.attention:
            patch.setattr(startup, "_attention", lambda device, groups, dtype: setup.attention)
        if setup.sampling:
            patch.setattr(startup, "_sampling", lambda device: setup.sampling)
        if setup.differs:
            found = iter([("a row", 0, np.zeros(42, np.int32))])
            patch.setattr(determinism, "invariant_ways", lambda *args: found)
        engine = startup.build_engine(model, setup.config())
    engine.compiles.close()  # others compile in this process; `drive` watches by itself
    return engine


def engine_for(setup: Setup, overlap: bool = True, params=None) -> Engine:
    """A fresh engine on the programs of a setup."""
    return fresh(built(setup), overlap, params)


def fresh(base: Engine, overlap: bool = True, params=None) -> Engine:
    """A fresh engine on the programs of another one."""
    pools, slots = jax.tree.map(jnp.zeros_like, base.runner.pools), base.limits.max_num_seqs
    state = (
        params if params is not None else base.runner.params,
        pools,
        empty_slots(slots, tuple(t.shape[1] for t in base.runner.slots.page_tables)),
        empty_options(slots, base.limits.vocab_size),
        empty_history(slots, base.limits.vocab_size),
    )
    transfer = base.runner.transfer
    if transfer is not None:
        transfer = PageTransfer(transfer.groups, transfer.host_pages, transfer.programs)
    runner = Runner(base.runner.programs, slots, state, transfer)
    scheduler = Scheduler(base.scheduler.limits, base.scheduler.policy)
    return Engine(scheduler, runner, base.limits, overlap, masks=base.masks)


@dataclasses.dataclass
class Output:
    """All that one request brought."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""


def request(
    name: str,
    prompt: Iterable[int],
    max_new_tokens: int,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
) -> Request:
    return Request(name, tuple(map(int, prompt)), params, max_new_tokens, seed, stop_ids)


def drive(
    engine: Engine,
    requests: list[Request],
    arrivals: int = 10**6,
    cancel_after: dict[str, int] | None = None,
) -> dict[str, Output]:
    """Run requests to their end, `arrivals` new ones a step. Nothing may compile meanwhile.

    `cancel_after` names requests that are cancelled once that many of their tokens came.
    """
    outputs = {r.id: Output() for r in requests}
    cancel_after, waiting = cancel_after or {}, list(requests)
    watch = CompileWatch(guard=True)
    watch.ready()
    try:
        while waiting or engine.has_work:
            for r in waiting[:arrivals]:
                engine.execute(Submit(r), 0.0)
            del waiting[:arrivals]
            for event in engine.step(0.0):
                output = outputs[event.request_id]
                assert output.finish is None, "an event after the end"
                output.tokens += event.tokens
                output.logprobs += event.logprobs
                output.prompt_logprobs += event.prompt_logprobs or ()
                output.finish, output.error = event.finish, event.error
                if len(output.tokens) >= cancel_after.get(event.request_id, 10**6):
                    engine.execute(Abort(event.request_id), 0.0)
            if len(requests) < 500 or not engine._in_flight or engine.scheduler._step % 10 == 0:
                engine.scheduler.check_invariants()
    finally:
        watch.close()
    assert watch.compiles_after_ready == 0
    assert all(allocator.num_used == 0 for allocator in engine.scheduler.allocators)
    assert len(engine.scheduler._free_slots) == engine.scheduler.limits.num_slots
    counters = engine.counters
    assert counters.received == len(requests) == counters.finished + counters.aborted
    assert counters.generated_tokens == sum(len(o.tokens) for o in outputs.values())
    return outputs


@functools.partial(jax.jit, static_argnames=("config",))
def dense_logits(params, tokens, *, config: ModelConfig):
    """float32 logits [T, V] by plain causal attention over the whole sequence, no cache at all."""
    family, count = family_of(config.family), len(tokens)
    x = family.embed(params, config, tokens, jnp.arange(count))
    context = family.layer_context(config, jnp.arange(count))
    causal = jnp.arange(count)[None, :] <= jnp.arange(count)[:, None]

    def attend(q, k, v, sinks, rotary, norms):
        assert norms is None
        q = apply_rope(q.reshape(count, -1, q.shape[-1]), *rotary).reshape(q.shape)
        k = apply_rope(k, *rotary)
        scores = jnp.einsum("tkgd,skd->kgts", q, k) * config.head_dim**-0.5
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("kgts,skd->tkgd", weights, v)

    for layer_params in params["layers"]:
        x = family.layer(layer_params, config, config.kind(0), x, context, attend)
    return family.unembed(params, config, x)


def naive_logits(tokens: list[int], params=None) -> np.ndarray:
    """Logits after every prefix of `tokens`, padded to one shape."""
    padded = np.full(MAX_MODEL_LEN, tokens[-1], np.int32)
    padded[: len(tokens)] = tokens
    params = params if params is not None else tiny_params()
    return np.asarray(dense_logits(params, padded, config=TINY))[: len(tokens)]


def naive_logprobs(tokens: list[int], params=None) -> np.ndarray:
    """Log-softmax of `naive_logits`, in float64."""
    logits = naive_logits(tokens, params).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(r: Request, output: Output, params=None, tolerance: float = TOLERANCE) -> None:
    """The output is what the naive loop gives: every token follows from those before it.

    So all of them equal the loop's, but for near ties within the tolerance.
    """
    prompt, tokens = list(r.prompt), output.tokens
    logits = naive_logits(prompt + tokens, params)[len(prompt) - 1 :]
    for i, token in enumerate(tokens):
        wrong = reference_sampler.problem(
            token, logits[i], r.params, r.seed, prompt, tokens[:i], tolerance
        )
        assert not wrong, f"{r.id}, output token {i}: {wrong}"
    if r.params.prompt_logprobs is not None and output.finish is not FinishReason.CANCELLED:
        _check_prompt_logprobs(r, output, naive_logprobs(prompt, params), tolerance)
    assert not set(tokens[:-1]) & set(r.stop_ids)
    if output.finish is FinishReason.CANCELLED:
        assert len(tokens) <= r.max_new_tokens
    elif tokens and tokens[-1] in r.stop_ids:
        own = tokens[-1] in r.params.stop_token_ids
        assert output.finish is (FinishReason.STOP_ID if own else FinishReason.EOS)
    else:
        assert output.finish is FinishReason.LENGTH and len(tokens) == r.max_new_tokens
    if r.params.logprobs is None:
        assert not output.logprobs
    else:
        exact = naive_logprobs(prompt + tokens, params)[len(prompt) - 1 :]
        _check_logprobs(r, output, exact, tolerance)


def _check_logprobs(r: Request, output: Output, exact: np.ndarray, tolerance: float) -> None:
    assert len(output.logprobs) == len(output.tokens)
    for token, said, line in zip(output.tokens, output.logprobs, exact):
        _check_entry(said, token, line, r.params.logprobs, tolerance)


def _check_prompt_logprobs(r: Request, output: Output, exact: np.ndarray, tolerance: float) -> None:
    """One entry for every token of the prompt but its first, each once."""
    assert len(output.prompt_logprobs) == len(r.prompt) - 1
    for token, said, line in zip(r.prompt[1:], output.prompt_logprobs, exact):
        _check_entry(said, token, line, r.params.prompt_logprobs, tolerance)


def _check_entry(
    said: TokenLogprobs, token: int, line: np.ndarray, top: int, tolerance: float
) -> None:
    assert abs(said.logprob - line[token]) <= tolerance
    surely = (line > line[token] + 2 * tolerance).sum()
    perhaps = (line > line[token] - 2 * tolerance).sum()
    assert 1 + surely <= said.rank <= max(1, perhaps)
    assert len(said.top) == top
    best = -np.sort(-line)[: len(said.top)]
    np.testing.assert_allclose([value for _, value in said.top], best, atol=tolerance)
    np.testing.assert_allclose([line[i] for i, _ in said.top], best, atol=tolerance)
