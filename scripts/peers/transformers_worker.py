"""Runs batches through Hugging Face transformers in float32 for scripts/compare_peers.

Runs in an interpreter of its own that has `torch` and `transformers`, without this project. Usage:

    python transformers_worker.py FOLDER THREADS static|continuous

Reads one JSON object a line, {"prompts": [[ids]], "output_len": n}; answers each with
{"marks": [[seconds, tokens, first tokens], ...]}, one mark a step that brought tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)

Run = Callable[[list, int], list]


class Stopwatch(StoppingCriteria):
    """Never stops; takes the time after every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def static_batching(model: torch.nn.Module) -> Run:
    """`generate` on one batch of prompts of the same length."""

    def run(prompts: list, output_len: int) -> list:
        ids, watch = torch.tensor(prompts), Stopwatch()
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            stopping_criteria=[watch],
            **options,
        )
        if out.shape[1] != len(prompts[0]) + output_len:
            raise SystemExit(f"transformers gave {out.shape[1]} tokens with the prompt")
        rows = len(prompts)
        return [[t - start, rows, rows if i == 0 else 0] for i, t in enumerate(watch.times)]

    return run


def continuous_batching(model: torch.nn.Module) -> Run:
    """The continuous batching manager, kept alive between batches."""
    config = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, allow_block_sharing=False
    )
    manager = model.init_continuous_batching(config, continuous_batching_config=batching)
    manager.start()

    def run(prompts: list, output_len: int) -> list:
        start = time.perf_counter()
        manager.add_requests(prompts, max_new_tokens=output_len, record_timestamps=True)
        times = []
        while len(times) < len(prompts):
            result = manager.get_result(timeout=600)
            if result is None or result.error or len(result.generated_tokens) != output_len:
                raise SystemExit(f"transformers continuous batching failed: {result}")
            times.append(result.timestamps)
        # Step k is over when every stream has its k-th token.
        ends = [max(stream[k] for stream in times) for k in range(output_len)]
        return [[t - start, len(prompts), len(prompts) * (k == 0)] for k, t in enumerate(ends)]

    return run


def main() -> None:
    folder, threads, kind = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    run = {"static": static_batching, "continuous": continuous_batching}[kind](model)
    with torch.inference_mode():
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps({"marks": run(job["prompts"], job["output_len"])}), flush=True)
    os._exit(0)  # the batching manager's thread would keep the process alive


if __name__ == "__main__":
    main()
