from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoResponse(_message.Message):
    __slots__ = ("version", "model_names", "dtype", "tensor_parallel_size", "slots", "max_model_len", "chunk_tokens", "page_size", "pages", "kv_capacity_tokens", "kv_offload_bytes", "prefix_cache", "deterministic", "determinism", "preset", "tpot_target_ms", "max_queued_requests", "max_queued_tokens", "uptime", "generation", "quantization", "kv_dtype")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_OFFLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    DETERMINISM_FIELD_NUMBER: _ClassVar[int]
    PRESET_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    version: str
    model_names: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    tensor_parallel_size: int
    slots: int
    max_model_len: int
    chunk_tokens: int
    page_size: int
    pages: int
    kv_capacity_tokens: int
    kv_offload_bytes: int
    prefix_cache: bool
    deterministic: bool
    determinism: str
    preset: str
    tpot_target_ms: float
    max_queued_requests: int
    max_queued_tokens: int
    uptime: float
    generation: GenerationDefaults
    quantization: str
    kv_dtype: str
    def __init__(self, version: _Optional[str] = ..., model_names: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., page_size: _Optional[int] = ..., pages: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., kv_offload_bytes: _Optional[int] = ..., prefix_cache: bool = ..., deterministic: bool = ..., determinism: _Optional[str] = ..., preset: _Optional[str] = ..., tpot_target_ms: _Optional[float] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., uptime: _Optional[float] = ..., generation: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., quantization: _Optional[str] = ..., kv_dtype: _Optional[str] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("eos_token_ids", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_new_tokens", "max_length", "stop", "not_honoured")
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NOT_HONOURED_FIELD_NUMBER: _ClassVar[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_new_tokens: int
    max_length: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    not_honoured: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, eos_token_ids: _Optional[_Iterable[int]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., max_length: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., not_honoured: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pages(_message.Message):
    __slots__ = ("free", "cached", "used")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    used: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class Percentiles(_message.Message):
    __slots__ = ("p50", "p90", "p99")
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p90: float
    p99: float
    def __init__(self, p50: _Optional[float] = ..., p90: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("received", "finished", "aborted", "refused", "prompt_tokens", "generated_tokens", "preemptions", "thrashes", "prefix_queries", "prefix_hits")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    THRASHES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    received: int
    finished: int
    aborted: int
    refused: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    thrashes: int
    prefix_queries: int
    prefix_hits: int
    def __init__(self, received: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., refused: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., thrashes: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("time", "slots", "running", "waiting", "waiting_tokens", "pages", "page_size", "ttft", "tpot", "counters")
    TIME_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    time: float
    slots: int
    running: int
    waiting: int
    waiting_tokens: int
    pages: Pages
    page_size: int
    ttft: Percentiles
    tpot: Percentiles
    counters: Counters
    def __init__(self, time: _Optional[float] = ..., slots: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., pages: _Optional[_Union[Pages, _Mapping]] = ..., page_size: _Optional[int] = ..., ttft: _Optional[_Union[Percentiles, _Mapping]] = ..., tpot: _Optional[_Union[Percentiles, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval", "map_cells")
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MAP_CELLS_FIELD_NUMBER: _ClassVar[int]
    interval: float
    map_cells: int
    def __init__(self, interval: _Optional[float] = ..., map_cells: _Optional[int] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load", "steps", "steps_left_out", "page_maps", "rows")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PAGE_MAPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    load: LoadResponse
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    steps_left_out: int
    page_maps: _containers.RepeatedCompositeFieldContainer[PageMap]
    rows: _containers.RepeatedCompositeFieldContainer[SlotRow]
    def __init__(self, load: _Optional[_Union[LoadResponse, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., steps_left_out: _Optional[int] = ..., page_maps: _Optional[_Iterable[_Union[PageMap, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[SlotRow, _Mapping]]] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "time", "running", "waiting", "decodes", "chunk_tokens", "admitted", "preempted", "pages")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    time: float
    running: int
    waiting: int
    decodes: int
    chunk_tokens: int
    admitted: int
    preempted: int
    pages: Pages
    def __init__(self, step: _Optional[int] = ..., time: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., decodes: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., admitted: _Optional[int] = ..., preempted: _Optional[int] = ..., pages: _Optional[_Union[Pages, _Mapping]] = ...) -> None: ...

class SlotRow(_message.Message):
    __slots__ = ("slot", "request_id", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "most_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    most_tokens: int
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., most_tokens: _Optional[int] = ...) -> None: ...

class PageMap(_message.Message):
    __slots__ = ("pages", "cells")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    cells: bytes
    def __init__(self, pages: _Optional[int] = ..., cells: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpertLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpertLoadResponse(_message.Message):
    __slots__ = ("time", "experts", "experts_per_token", "layers")
    TIME_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    time: float
    experts: int
    experts_per_token: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, time: _Optional[float] = ..., experts: _Optional[int] = ..., experts_per_token: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "tokens", "imbalance")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    imbalance: float
    def __init__(self, layer: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., imbalance: _Optional[float] = ...) -> None: ...
