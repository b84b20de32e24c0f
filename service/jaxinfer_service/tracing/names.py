"""Names of spans' attributes.

OpenTelemetry's semantic conventions for generative AI, RPC and HTTP, of which the first two may
still change; latencies as vLLM names them; ours begin with `jaxinfer.`.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
OUTPUT_TYPE = "gen_ai.output.type"
CHOICES, SEED = "gen_ai.request.choice.count", "gen_ai.request.seed"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE, TOP_P, TOP_K = (f"gen_ai.request.{name}" for name in ("temperature", "top_p", "top_k"))
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
# In seconds.
IN_QUEUE = "gen_ai.latency.time_in_queue"
FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
IN_DECODE = "gen_ai.latency.time_in_model_decode"
IN_MODEL = "gen_ai.latency.time_in_model_inference"
WHOLE = "gen_ai.latency.e2e"

PREEMPTIONS = "jaxinfer.preemptions"
PRIORITY, TENANT = "jaxinfer.request.priority", "jaxinfer.request.tenant"
PROMPT = "jaxinfer.prompt"

ERROR = "error.type"
RPC_SYSTEM, RPC_METHOD = "rpc.system.name", "rpc.method"
RPC_STATUS = "rpc.response.status_code"
HTTP_METHOD, HTTP_ROUTE = "http.request.method", "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH, URL_SCHEME = "url.path", "url.scheme"
REQUEST_ID = "jaxinfer.request.id"
