"""Options of other engines that this one does not have, and what to use instead."""

from __future__ import annotations

_OFFLOAD = "use --kv-offload-gib: preempted sequences' pages go to the host and come back"
_PRIORITIES = (
    "each request has a priority, lower first, and requests of one priority share by"
    " --tenant-weight; leave it out"
)
_ONE_REPLICA = "a server is one replica: shard it with --tensor-parallel-size, or run several"
_CHECKPOINT = "the checkpoint's own is used; convert or edit the checkpoint instead"
_NO_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_ALWAYS = "is always on; leave it out"
_LOG_PROMPTS = "use --log-prompts; --log-level debug has a line for each request that ends"
_REQUEST = "is set by each request, not by the server"

ADVICE: dict[str, str] = {
    "--swap-space": _OFFLOAD,
    "--cpu-offload-gb": "weights stay on the device; use a smaller --dtype",
    "--kv-offloading-size": _OFFLOAD,
    "--hicache-size": _OFFLOAD,
    "--preemption-mode": "preempted sequences are recomputed; to swap them, use --kv-offload-gib",
    "--scheduling-policy": _PRIORITIES,
    "--schedule-policy": _PRIORITIES,
    "--enable-priority-scheduling": _PRIORITIES,
    "--schedule-conservativeness": "use --kv-watermark",
    "--watermark": "use --kv-watermark",
    "--performance-mode": "use --preset",
    "--enable-deterministic-inference": "use --deterministic",
    "--enforce-eager": "every step is a compiled program, and later starts take them from the"
    " compilation cache; leave it out",
    "--cuda-graph-sizes": "follow from --max-num-seqs and --max-num-batched-tokens",
    "--num-gpu-blocks-override": "use --kv-cache-memory",
    "--kv-cache-memory-bytes": "use --kv-cache-memory, e.g. 2GiB",
    "--enable-lora": _NO_ADAPTERS,
    "--lora-modules": _NO_ADAPTERS,
    "--lora-paths": _NO_ADAPTERS,
    "--load-in-8bit": "use --quantization int8",
    "--weight-quantization": "use --quantization",
    "--disable-radix-cache": "use --no-prefix-cache",
    "--enable-chunked-prefill": _ALWAYS + "; --max-num-batched-tokens sets the chunk",
    "--async-scheduling": _ALWAYS + "; --no-overlap turns it off",
    "--speculative-config": "speculative decoding is not supported; leave it out",
    "--pipeline-parallel-size": _ONE_REPLICA,
    "--data-parallel-size": _ONE_REPLICA,
    "--tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "--tensor-parallel": "use --tensor-parallel-size",
    "--num-shard": "use --tensor-parallel-size",
    "--model": "give the model as an argument: jaxinfer serve MODEL",
    "--model-path": "give the model as an argument: jaxinfer serve MODEL",
    "--model-id": "give the model as an argument: jaxinfer serve MODEL",
    "--context-length": "use --max-model-len",
    "--ctx-size": "use --max-model-len",
    "--max-total-tokens": "use --max-model-len",
    "--max-input-tokens": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--max-batch-size": "use --max-num-seqs",
    "--parallel": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--max-batch-prefill-tokens": "use --max-num-batched-tokens",
    "--mem-fraction-static": "use --gpu-memory-utilization",
    "--cuda-memory-fraction": "use --gpu-memory-utilization",
    "--max-concurrent-requests": "use --max-queued-requests",
    "--device": "set the environment variable JAX_PLATFORMS, e.g. cpu or cuda",
    "--trust-remote-code": "a checkpoint's code is never run; leave it out",
    "--tokenizer": _CHECKPOINT,
    "--tokenizer-path": _CHECKPOINT,
    "--tokenizer-mode": "is found from the files; leave it out",
    "--chat-template-file": "use --chat-template",
    "--chat-template-content-format": "message contents are text; leave it out",
    "--jinja": "the checkpoint's template is always used; leave it out",
    "--sampling-defaults": "use --generation-config auto (the model's) or none",
    "--preferred-sampling-params": "use --override-generation-config",
    "--temp": "is set by each request, or for all of them by --override-generation-config",
    "--hf-overrides": _CHECKPOINT,
    "--load-format": "is found from the files; leave it out",
    "--download-dir": "set the environment variable JAXINFER_CACHE",
    "--api-key": "use --api-keys FILE; `jaxinfer make-key` writes its entries",
    "--ssl-keyfile": "use --tls-key",
    "--ssl-certfile": "use --tls-cert",
    "--max-logprobs": "a request may ask for the 20 most likely tokens; leave it out",
    "--max-num-partial-prefills": "a chunk serves up to 8 prompts at once; leave it out",
    "--long-prefill-token-threshold": "use --tpot-target-ms: chunks are sized so that running"
    " streams keep it",
    "--enable-auto-tool-choice": _ALWAYS,
    "--enable-reasoning": _ALWAYS + "; --reasoning-parser says how it is written",
    "--exclude-tools-when-tool-choice-none": _ALWAYS,
    "--tool-parser-plugin": "--tool-call-parser names those there are",
    "--seed": _REQUEST,
    "--disable-log-requests": "requests are logged with --log-level debug only; leave it out",
    "--enable-trace": "use --otlp-endpoint",
    "--collect-detailed-traces": "spans have the times of queue, prefill and decode; leave it out",
    "--uvicorn-log-level": "use --log-level",
    "--enable-log-requests": _LOG_PROMPTS,
    "--log-requests": _LOG_PROMPTS,
    "--enable-log-outputs": "outputs are never logged; leave it out",
}
