"""The comparison with peers: order of turns, pairing, the workers' line protocol."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import typer
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.bench.drive import StepMark
from jaxinfer.bench.peers import Cell, LlamaBatchedBench, Worker, cells, compare

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "compare_peers"
DECODE, PREFILL = Cell(2, 8, 3), Cell(1, 16, 0)

# Answers every job with one prefill step of 2 s and decode steps of 0.5 s, after some chatter.
WORKER = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    rows = len(job["prompts"])
    marks = [[2.0 + 0.5 * i, rows, rows * (i == 0)] for i in range(job["output_len"])]
    print("loading weights")
    print(json.dumps({"marks": marks}), flush=True)
"""


class Fixed:
    """A contender with known rates, one a measurement."""

    def __init__(self, name: str, log: list, *rates: float):
        self.name, self.log, self.rates = name, log, list(rates)

    def measure(self, cell: Cell, seed: int) -> float:
        self.log.append((self.name, seed))
        return self.rates.pop(0)

    def close(self) -> None:
        self.log.append((self.name, "closed"))


def test_rates_of_a_cell_by_hand():
    marks = [StepMark(2.0, 1, 1), StepMark(4.0, 2, 1), StepMark(4.5, 2, 0), StepMark(5.0, 2, 0)]
    assert DECODE.rate(marks) == 4.0
    assert PREFILL.rate([StepMark(2.0, 1, 1)]) == 8.0
    with pytest.raises(RuntimeError, match="never all decoded"):
        DECODE.rate(marks[:2])


def test_cells_ask_for_one_token_more_than_they_decode():
    assert cells([1, 8], 128, 64, 512) == [Cell(1, 128, 64), Cell(8, 128, 64), Cell(1, 512, 0)]
    assert cells([4], 10, 5, 0) == [Cell(4, 10, 5)]
    items = Cell(8, 128, 64).items(vocab_size=100, seed=1)
    assert {(len(i.prompt), i.output_len) for i in items} == {(128, 65)}
    assert len(items) == 8
    assert Cell(1, 512, 0).items(100, 1)[0].output_len == 1


def test_contenders_take_turns_and_rounds_are_paired():
    log: list = []
    # The machine is ten times slower in round 2; ours is twice as fast all the same.
    contenders = [Fixed("ours", log, 1, 200, 20, 200), Fixed("peer", log, 9, 100, 10, 100)]
    result = compare(contenders, [DECODE], rounds=3)
    order = " ".join(name for name, _ in log)
    assert order == "ours peer peer ours ours peer peer ours"
    assert [seed for _, seed in log] == [0, 0, 1, 1, 2, 2, 3, 3]  # both are given the same prompts
    (entry,) = result.report()
    assert entry["rates"] == {"ours": [200, 20, 200], "peer": [100, 10, 100]}
    assert entry["medians"] == {"ours": 200, "peer": 100}
    ratio = entry["ratios"]["ours"]["peer"]
    assert (ratio["median"], ratio["low"], ratio["high"]) == (2.0, 2.0, 2.0)
    assert entry["rounds"] == 3


def test_each_of_ours_is_compared_with_those_before_it_and_with_every_peer():
    rates = {"ours": 10, "ours, other": 20, "peer": 5, "another": 40}
    contenders = [Fixed(name, [], rate, rate) for name, rate in rates.items()]
    (entry,) = compare(contenders, [DECODE], rounds=1, ours=2).report()
    found = {own: {name: r["median"] for name, r in ratios.items()}
             for own, ratios in entry["ratios"].items()}  # fmt: skip
    assert found == {
        "ours": {"peer": 2.0, "another": 0.25},
        "ours, other": {"ours": 2.0, "peer": 4.0, "another": 0.5},
    }


def test_progress_counts_every_measurement():
    seen: list = []
    contenders = [Fixed("ours", [], *range(1, 5)), Fixed("peer", [], *range(1, 5))]
    compare(contenders, [DECODE, PREFILL], rounds=1, progress=lambda *r: seen.append(r))
    assert [done for _, done, _ in seen] == list(range(8))
    assert {total for _, _, total in seen} == {8}


def test_a_worker_stays_warm_and_its_chatter_is_ignored():
    worker = Worker("peer", [sys.executable, "-c", WORKER], vocab_size=50)
    try:
        assert worker.measure(DECODE, seed=1) == 4.0
        assert worker.measure(PREFILL, seed=1) == 8.0
    finally:
        worker.close()
    assert worker._process.returncode == 0


def test_a_worker_that_dies_is_named():
    worker = Worker("peer", [sys.executable, "-c", "import sys; sys.exit(3)"], vocab_size=50)
    with pytest.raises(RuntimeError, match="peer ended with exit code 3"):
        worker.measure(DECODE, seed=1)
    worker.close()


def batched_bench(folder: Path, body: str) -> LlamaBatchedBench:
    """A stand-in for the program that keeps its arguments beside itself."""
    program = folder / "llama-batched-bench"
    program.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\n{body}\n")
    program.chmod(0o755)
    return LlamaBatchedBench(program, folder / "model.gguf", threads=3)


def test_batched_bench_is_asked_for_the_same_work(tmp_path):
    body = (
        "pathlib.Path(sys.argv[0] + '.args').write_text(json.dumps(sys.argv[1:]))\n"
        "print('main: header')\nprint(json.dumps({'speed_pp': 500.5, 'speed_tg': 70.25}))"
    )
    bench = batched_bench(tmp_path, body)
    assert bench.measure(DECODE, seed=0) == 70.25
    arguments = json.loads((tmp_path / "llama-batched-bench.args").read_text())
    given = dict(zip(arguments[::2], arguments[1::2]))
    assert (given["-npp"], given["-ntg"], given["-npl"]) == ("8", "3", "2")
    assert (given["-t"], given["-tb"]) == ("3", "3")
    assert int(given["-c"]) >= 2 * (8 + 3)
    assert bench.measure(PREFILL, seed=0) == 500.5


def test_a_failing_batched_bench_shows_what_it_said(tmp_path):
    bench = batched_bench(tmp_path, "sys.exit('no such model')")
    with pytest.raises(RuntimeError, match="no such model"):
        bench.measure(DECODE, seed=0)


def run_script(*arguments: object):
    app = typer.Typer()
    app.command()(runpy.run_path(str(SCRIPT))["main"])
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_script_compares_a_tiny_model_with_a_peer(tmp_path):
    model = hf_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    bench = batched_bench(tmp_path, "print(json.dumps({'speed_pp': 1e9, 'speed_tg': 1e-9}))")
    sizes = ("--streams", "1,2", "--prompt-len", 4, "--decode-steps", 3, "--prefill-len", 9)
    peer = ("--llama-batched-bench", bench.binary, "--gguf", tmp_path / "any.gguf")
    out = tmp_path / "out.json"
    result = run_script(model, *sizes, *peer, "--rounds", 2, "--threads", 1, "--json", out)
    assert result.exit_code == 0, result.output
    assert "llama.cpp" in result.output
    found = json.loads(out.read_text())
    _, decode_2, prefill = found["cells"]
    assert [c["cell"] for c in found["cells"]] == [
        "decode tok/s, 1 streams",
        "decode tok/s, 2 streams",
        "prefill tok/s, 9 tokens",
    ]
    ratios = [cell["ratios"]["jaxinfer"]["llama.cpp"] for cell in found["cells"]]
    assert min(ratios[0]["low"], decode_2["medians"]["jaxinfer"]) > 1
    assert ratios[2]["high"] < 1
    assert [len(rates) for rates in prefill["rates"].values()] == [2, 2]
    assert found["threads"] == 1 and found["files"] == {"llama.cpp": str(tmp_path / "any.gguf")}


def test_the_script_compares_settings_of_our_own_engine(tmp_path):
    model = hf_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    sizes = ("--streams", "2", "--prompt-len", 4, "--decode-steps", 3, "--prefill-len", 0)
    out = tmp_path / "out.json"
    run = (model, *sizes, "--rounds", 1, "--json", out, "--variant")
    result = run_script(*run, "overlap=false")
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["ratios"]["jaxinfer"] == {}
    assert list(cell["ratios"]["jaxinfer overlap=false"]) == ["jaxinfer"]
    refused = run_script(*run, "overlaps=false")
    assert refused.exit_code == 2
    assert "page_size" in refused.output


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--llama-batched-bench", "/bin/true"), "--gguf"),
        (("--transformers-python", "/bin/true"), "--hf"),
        (("--openvino-gguf", "any.gguf"), "--openvino-python"),
        (("--ctranslate2-model", "folder"), "--ctranslate2-python"),
        (("--transformers-continuous",), "--transformers-python"),
        (("--streams", "1,many"), "--streams"),
    ],
)
def test_an_incomplete_command_line_is_refused_before_anything_is_loaded(arguments, named):
    result = run_script("/no/such/model", *arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_a_worker_stands_still_between_its_turns():
    worker = Worker("peer", [sys.executable, "-c", WORKER], vocab_size=100)
    worker.measure(DECODE, seed=0)
    _, status = os.waitpid(worker._process.pid, os.WUNTRACED)  # returns once it is stopped
    assert os.WIFSTOPPED(status)
    assert worker.measure(DECODE, seed=1) == 4.0
    worker.close()
    assert worker._process.poll() == 0
