"""Runs batches through openvino-genai's continuous batching for scripts/compare_peers.

Runs in an interpreter of its own that has `openvino-genai`, without this project. Usage:

    python openvino_worker.py MODEL.gguf THREADS KV_PRECISION

Reads one JSON object a line, {"prompts": [[ids]], "output_len": n}; answers each with
{"marks": [[seconds, tokens, first tokens], ...]}, one mark a step that brought tokens.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as ov_genai

MAX_STREAMS = 64
BATCHED_TOKENS = 512


def open_pipeline(
    path: str, threads: int, kv_precision: str
) -> ov_genai.ContinuousBatchingPipeline:
    scheduler = ov_genai.SchedulerConfig()
    scheduler.max_num_seqs = MAX_STREAMS
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    if kv_precision != "default":
        properties["KV_CACHE_PRECISION"] = kv_precision
    return ov_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)


def run(pipeline: ov_genai.ContinuousBatchingPipeline, prompts: list, output_len: int) -> list:
    config = ov_genai.GenerationConfig()
    config.max_new_tokens = output_len
    config.min_new_tokens = output_len
    config.ignore_eos = True
    config.do_sample = False
    start = time.perf_counter()
    handles = []
    for i, prompt in enumerate(prompts):
        ids = ov.Tensor(np.asarray([prompt], np.int64))
        handles.append(pipeline.add_request(i, ids, config))
    marks, counts = [], [0] * len(handles)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now, tokens, firsts = time.perf_counter() - start, 0, 0
        for i, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    new = len(output.generated_ids)
                    firsts += counts[i] == 0 and new > 0
                    counts[i] += new
                    tokens += new
        if tokens:
            marks.append([now, tokens, int(firsts)])
    if set(counts) != {output_len}:
        raise SystemExit(f"openvino-genai gave {sorted(set(counts))} tokens, not {output_len}")
    return marks


def main() -> None:
    pipeline = open_pipeline(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        job = json.loads(line)
        marks = run(pipeline, job["prompts"], job["output_len"])
        print(json.dumps({"marks": marks}), flush=True)


if __name__ == "__main__":
    main()
