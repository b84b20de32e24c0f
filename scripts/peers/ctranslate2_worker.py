"""Runs batches through CTranslate2 for scripts/compare_peers.

Runs in an interpreter of its own that has `ctranslate2`, without this project. Usage:

    python ctranslate2_worker.py FOLDER THREADS COMPUTE_TYPE

Reads one JSON object a line, {"prompts": [[ids]], "output_len": n}; answers each with
{"marks": [[seconds, tokens, first tokens], ...]}, one mark a step that brought tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ctranslate2


def run(generator: ctranslate2.Generator, words: list[str], prompts: list, output_len: int) -> list:
    """One batch of prompts of the same length, greedy, as many tokens for each."""
    rows, times = len(prompts), []

    def on_token(result: ctranslate2.GenerationStepResult) -> bool:
        if result.step == len(times):
            times.append(0.0)
        times[result.step] = time.perf_counter()  # of the last row in the end
        return False

    start = time.perf_counter()
    results = generator.generate_batch(
        [[words[token] for token in prompt] for prompt in prompts],
        max_length=output_len,
        min_length=output_len,
        include_prompt_in_result=False,
        beam_size=1,
        sampling_topk=1,
        callback=on_token,
    )
    counts = {len(result.sequences_ids[0]) for result in results}
    if counts != {output_len} or len(times) != output_len:
        raise SystemExit(f"ctranslate2 gave {sorted(counts)} tokens in {len(times)} steps")
    return [[at - start, rows, rows * (i == 0)] for i, at in enumerate(times)]


def main() -> None:
    folder, threads, compute_type = sys.argv[1:4]
    generator = ctranslate2.Generator(
        folder, device="cpu", inter_threads=1, intra_threads=int(threads), compute_type=compute_type
    )
    words = json.loads((Path(folder) / "vocabulary.json").read_text("utf-8"))
    for line in sys.stdin:
        job = json.loads(line)
        marks = run(generator, words, job["prompts"], job["output_len"])
        print(json.dumps({"marks": marks}), flush=True)


if __name__ == "__main__":
    main()
