"""The families, from the engine's load and the histograms of requests.

Families, labels and buckets are vLLM's, so dashboards and routers made for it read them unchanged
(`--metrics-prefix vllm`). What it has no name for is below its families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxinfer.expert_load import imbalance
from jaxinfer.load import Load
from jaxinfer.quantization.kinds import NONE
from jaxinfer.request import REFUSALS, FinishReason
from jaxinfer_service import version
from jaxinfer_service.metrics.histograms import Histogram, Histograms
from jaxinfer_service.model import ServedModel

LABELS = ("model_name", "engine")
ENGINE = "0"  # the only one of a server

# By our reasons, the `finished_reason` of request_success_total.
_FINISHED = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "abort",
    FinishReason.LATE: "abort",
    FinishReason.ERROR: "error",
    FinishReason.RULES: "error",
}


class Metrics(Collector):
    """Of one server. Before a model is served there is only that it is not healthy.

    Raises ValueError for a prefix that no metric's name can begin with.
    """

    def __init__(self, prefix: str = "jaxinfer"):
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise ValueError(
                f"the metrics prefix is {prefix!r}; it must be letters, digits and underscores, and"
                " begin with no digit"
            )
        self.prefix = prefix
        self.served: ServedModel | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return []  # they are known once there is a model

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(f"{self.prefix}:build", "What runs here.", {"version": version()})
        served = self.served
        healthy = served is not None and not served.frontend.unavailable()
        help_text = "1 while requests are taken, 0 while loading, stalled or draining."
        yield GaugeMetricFamily(f"{self.prefix}:healthy", help_text, value=float(healthy))
        if served is not None:
            yield from _Families(self.prefix, served).all()


class _Families:
    """The families of one scrape, all of the same moment."""

    def __init__(self, prefix: str, served: ServedModel):
        self._prefix, self._served = prefix, served
        self._labels = (served.names[0], ENGINE)
        self._load: Load = served.frontend.load()

    def all(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._requests()
        yield from self._of(self._served.histograms)
        yield from self._own()
        yield from self._times()
        yield from self._experts()

    # -- vLLM's ------------------------------------------------------------------------------------

    def _engine(self) -> Iterator[Metric]:
        load = self._load
        free, cached, used = load.pages
        usage = used / max(free + cached + used, 1)
        yield self._gauge("num_requests_running", "Requests that run.", load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", load.waiting)
        yield self._waiting()
        yield self._gauge("kv_cache_usage_perc", "KV pages in use; 1 is all of them.", usage)
        yield self._gauge("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", usage)
        config = self._served.opened.config
        yield self._said(
            "cache_config_info",
            "How the KV pool is.",
            block_size=str(load.page_size),
            num_gpu_blocks=str(free + cached + used),
            cache_dtype=config.pages,
            enable_prefix_caching=str(config.prefix_cache),
            gpu_memory_utilization=str(config.memory_utilization),
        )

    def _waiting(self) -> Metric:
        load = self._load
        family = GaugeMetricFamily(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Requests that wait: for capacity (a slot or pages), deferred while their grammar is"
            " read, preempted, for capacity to go on, or held, for a slow reader.",
            labels=[*LABELS, "reason"],
        )
        capacity = load.waiting - load.deferred - load.preempted - load.held
        family.add_metric([*self._labels, "capacity"], capacity)
        family.add_metric([*self._labels, "deferred"], load.deferred)
        family.add_metric([*self._labels, "preempted"], load.preempted)
        family.add_metric([*self._labels, "held"], load.held)
        return family

    def _requests(self) -> Iterator[Metric]:
        counters = self._load.counters
        for name, help_text, value in (
            ("prompt_tokens", "Tokens of the prompts that were queued.", counters.prompt_tokens),
            ("generation_tokens", "Tokens generated.", counters.generated_tokens),
            ("num_preemptions", "Preemptions.", counters.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", counters.prefix_hits),
        ):
            yield self._counter(name, help_text, value)

    def _of(self, found: Histograms) -> Iterator[Metric]:
        found.steps([*self._served.frontend.engine.records])
        ends = dict.fromkeys(_FINISHED.values(), 0)
        for reason, count in found.ends.items():
            ends[_FINISHED[reason]] += count
        family = CounterMetricFamily(
            f"{self._prefix}:request_success",
            "Requests that ended, by how.",
            labels=[*LABELS, "finished_reason"],
        )
        for ended, count in ends.items():
            family.add_metric([*self._labels, ended], count)
        yield family
        yield from self._sources(found)
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From arrival.", found.first_token),
            ("inter_token_latency_seconds", "Between a stream's tokens.", found.between_tokens),
            ("time_per_output_token_seconds", "Old name of the former.", found.between_tokens),
            (
                "request_time_per_output_token_seconds",
                "After the first one, a request's mean.",
                found.mean_between_tokens,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end.", found.whole),
            ("request_queue_time_seconds", "From arrival to a slot.", found.queued),
            ("request_prefill_time_seconds", "From a slot to the first token.", found.prefill),
            ("request_decode_time_seconds", "From the first token to the end.", found.decode),
            ("request_inference_time_seconds", "From a slot to the end.", found.computed),
            ("request_prompt_tokens", "Of a request.", found.prompt),
            (
                "request_prefill_kv_computed_tokens",
                "Of a request's prompt, without what the prefix cache had.",
                found.prompt_computed,
            ),
            ("request_generation_tokens", "Of a request.", found.generated),
            ("request_max_num_generation_tokens", "Of a request.", found.generated),
            ("request_params_max_tokens", "Output limit of a request.", found.limit),
            ("request_params_n", "Samples that a call asked for.", found.samples),
            ("iteration_tokens_total", "Tokens that a step computed.", found.step_tokens),
        ):
            yield self._histogram(name, help_text, histogram)

    def _sources(self, found: Histograms) -> Iterator[Metric]:
        cached = "Prompt tokens that the prefix cache had, of requests that ended."
        yield self._counter("prompt_tokens_cached", cached, found.prompt_cached)
        family = CounterMetricFamily(
            f"{self._prefix}:prompt_tokens_by_source",
            "Prompt tokens of requests that ended, by where their keys and values came from.",
            labels=[*LABELS, "source"],
        )
        family.add_metric([*self._labels, "local_compute"], found.prompt_computed.sum)
        family.add_metric([*self._labels, "local_cache_hit"], found.prompt_cached)
        yield family

    # -- ours --------------------------------------------------------------------------------------

    def _own(self) -> Iterator[Metric]:
        load, counters = self._load, self._load.counters
        config = self._served.opened.config
        yield self._said(
            "model_config_info",
            "How the model is computed.",
            dtype=config.dtype,
            quantization=config.quantization or NONE,
            tensor_parallel_size=str(config.tensor_parallel_size),
        )
        yield self._gauge("slots", "Requests that can run at once.", load.slots)
        yield self._gauge("waiting_tokens", "Prompt tokens that wait.", load.waiting_tokens)
        pages = GaugeMetricFamily(
            f"{self._prefix}:pages", "KV pages of all groups.", labels=[*LABELS, "state"]
        )
        for state, count in zip(("free", "cached", "used"), load.pages, strict=True):
            pages.add_metric([*self._labels, state], count)
        yield pages
        ends = CounterMetricFamily(
            f"{self._prefix}:requests_ended", "By reason.", labels=[*LABELS, "reason"]
        )
        for reason in FinishReason:
            ends.add_metric([*self._labels, reason.value], counters.by_reason.get(reason.value, 0))
        yield ends
        yield self._counter("requests_received", "Requests that came.", counters.received)
        refused = CounterMetricFamily(
            f"{self._prefix}:requests_refused", "Never started.", labels=[*LABELS, "reason"]
        )
        for why in REFUSALS:
            refused.add_metric([*self._labels, why], counters.refused_by.get(why, 0))
        yield refused
        yield self._counter("thrashes", "Preemptions that undid others.", counters.thrashes)
        uptime = self._served.frontend.uptime
        yield self._gauge("uptime_seconds", "Since the server began to serve.", uptime)

    def _times(self) -> Iterator[Metric]:
        engine = self._served.frontend.engine
        times, labels = engine.times, [*LABELS, "program"]
        busy = "Seconds in which a step was on the device."
        yield self._counter("device_busy_seconds", busy, times.busy)
        host = "Seconds of the engine's thread, without waiting for the device."
        yield self._counter("host_seconds", host, times.host)
        late = "Programs compiled while serving; never expected."
        yield self._counter("compiles_after_ready", late, engine.compiles_after_ready)
        for name, help_text, values in (
            ("steps", "By program: decode rows + prompt tokens.", {**times.steps}),
            ("step_seconds", "Of steps on the device, by program.", {**times.seconds}),
        ):
            family = CounterMetricFamily(f"{self._prefix}:{name}", help_text, labels=labels)
            for program, value in values.items():
                family.add_metric([*self._labels, program], value)
            yield family

    def _experts(self) -> Iterator[Metric]:
        experts = self._served.frontend.engine.experts
        if experts is None:
            return
        tokens = CounterMetricFamily(
            f"{self._prefix}:expert_tokens",
            "Tokens that went to an expert.",
            labels=[*LABELS, "layer", "expert"],
        )
        uneven = GaugeMetricFamily(
            f"{self._prefix}:expert_imbalance",
            "Tokens of a layer's busiest expert over their mean; 1 is ideal.",
            labels=[*LABELS, "layer"],
        )
        for layer, counts in zip(experts.layers, experts.tokens, strict=True):
            for expert, count in enumerate(counts):
                tokens.add_metric([*self._labels, str(layer), str(expert)], int(count))
            if (ratio := imbalance(counts)) is not None:
                uneven.add_metric([*self._labels, str(layer)], ratio)
        yield tokens
        yield uneven

    # -- families ----------------------------------------------------------------------------------

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _said(self, name: str, help_text: str, **said: str) -> Metric:
        """What is said in labels."""
        family = GaugeMetricFamily(f"{self._prefix}:{name}", help_text, labels=[*LABELS, *said])
        family.add_metric([*self._labels, *said.values()], 1.0)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, help_text: str, found: Histogram) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, found.buckets(), found.sum)
        return family
