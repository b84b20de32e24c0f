"""The command line: options, refusals by name, logs, and the commands on a tiny real model."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fake_engine import ScriptedEngine, forever, limits, says
from jaxinfer_service.access import Access, make_key
from jaxinfer_service.cli import app, console
from jaxinfer_service.cli.chat import Conversation
from jaxinfer_service.cli.foreign import ADVICE
from jaxinfer_service.cli.options import parse_count, parse_size
from jaxinfer_service.client import Client
from serving import server_thread
from tiny_checkpoint import hf_folder
from typer.testing import CliRunner

from jaxinfer.config import EngineConfig
from jaxinfer.request import Scheduling

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "service")])}
TINY = ("--max-num-seqs", "1", "--max-num-batched-tokens", "64", "--kv-cache-memory", "1MiB")


def run(*args, **kwargs):
    return CliRunner().invoke(app, [str(a) for a in args], **kwargs)


def in_process(*args, **kwargs):
    command = [sys.executable, "-m", "jaxinfer_service", *map(str, args)]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **kwargs
    )


def words(result):
    """The output with the error box's frame and line breaks taken out."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")


# -- options -------------------------------------------------------------------------------------


def test_numbers_as_people_write_them():
    assert [parse_count(v) for v in ("8192", "8k", "8K", "1.5k", "2M", 7)] == [
        8192, 8000, 8192, 1500, 2 << 20, 7,
    ]  # fmt: skip
    assert [parse_size(v) for v in ("2GiB", "2GB", "512 MiB", "1.5KiB", "100")] == [
        2 << 30, 2 * 10**9, 512 << 20, 1536, 100,
    ]  # fmt: skip
    for bad in ("8q", "", "-1", "k", "1e3", "2 G iB"):
        with pytest.raises(typer.BadParameter):
            parse_count(bad)
        with pytest.raises(typer.BadParameter):
            parse_size(bad)


def test_an_option_of_another_engine_is_refused_by_name():
    for command in (("serve", "m"), ("generate", "m", "-p", "x")):
        for option in ("--swap-space", "--cpu-offload-gb", "--enforce-eager", "--enable-lora"):
            result = run(*command, option, "4")
            assert result.exit_code == 2
            assert f"{option}: {ADVICE[option]}" in words(result)
    assert run("serve", "m", "--swap-space=4").exit_code == 2
    assert "use --max-model-len" in words(run("serve", "m", "--context-length", "9"))


def test_no_option_of_ours_is_among_the_refused_and_advice_names_real_ones():
    command = typer.main.get_command(app).get_command(None, "serve")
    ours = {n for p in command.params for n in (*p.opts, *p.secondary_opts)}
    assert not ours & set(ADVICE)
    named = {w.strip(",;:()") for text in ADVICE.values() for w in text.split() if w[:2] == "--"}
    assert named <= ours


def test_an_unknown_option_or_command_is_answered_with_the_nearest():
    result = run("serve", "m", "--max-num-seq", "3")
    assert result.exit_code == 2 and "Did you mean --max-num-seqs?" in words(result)
    assert "Did you mean 'serve'?" in words(run("serv"))


def serve_options(monkeypatch, *args):
    """What `serve` would hand to the server: (server config, what to serve)."""
    seen = []

    async def serve(*options):
        seen.append(options)
        return True

    monkeypatch.setattr(sys.modules["jaxinfer_service.cli.serve"], "_serve", serve)
    result = run("serve", "some/model", *args)
    assert result.exit_code == 0, result.output
    ((config, source),) = seen
    assert source.model == "some/model"
    return config, source


def test_the_options_of_serve_reach_the_engine(monkeypatch):
    config, source = serve_options(monkeypatch)
    assert (config.host, config.port) == ("127.0.0.1", 50051)
    assert (source.names, source.dtype, source.preset) == (["model"], None, "")
    assert source.engine == EngineConfig()
    args = {
        "--host": "::1", "--port": 7, "--served-model-name": "n", "--drain-timeout": 3,
        "--stall-timeout": 4, "--dtype": "bfloat16", "--max-model-len": "8k",
        "--max-num-seqs": 9, "--max-num-batched-tokens": "1K", "--kv-cache-memory": "2GiB",
        "--kv-cache-dtype": "float16", "--gpu-memory-utilization": 0.5, "--block-size": 32,
        "--tensor-parallel-size": 2, "--max-queued-requests": 5, "--max-queued-tokens": "6k",
        "--kv-watermark": 0.25, "--kv-offload-gib": 1.5, "--priority-ageing": 8,
        "--tpot-target-ms": 50, "--batch-priority": 3, "--interactive-reserve": 0.5,
        "--tenant-weight": "a=b=2", "--quantization": "w8a8",
    }  # fmt: skip
    flat = [str(part) for pair in args.items() for part in pair]
    more = ("--served-model-name", "m", "--no-overlap", "--no-prefix-cache", "--deterministic")
    more += ("--no-cpu-kernels",)
    config, source = serve_options(monkeypatch, *flat, *more, "--tenant-weight", "b=0.5")
    assert (config.host, config.port, config.drain_timeout, config.stall_limit) == ("::1", 7, 3, 4)
    assert (source.names, source.dtype) == (["n", "m"], "bfloat16")
    assert source.engine == EngineConfig(
        max_num_seqs=9,
        max_model_len=8000,
        max_num_batched_tokens=1024,
        page_size=32,
        kv_pool_bytes=2 << 30,
        memory_utilization=0.5,
        kv_dtype="float16",
        overlap=False,
        tensor_parallel_size=2,
        max_queued_requests=5,
        max_queued_tokens=6000,
        prefix_cache=False,
        kv_watermark=0.25,
        kv_offload_bytes=3 << 29,
        priority_ageing=8,
        tenant_weights=(("a=b", 2.0), ("b", 0.5)),
        tpot_target_ms=50,
        batch_priority=3,
        interactive_reserve=0.5,
        deterministic=True,
        quantization="w8a8",
        cpu_kernels=False,
    )
    changed = dataclasses.asdict(source.engine).items() - dataclasses.asdict(EngineConfig()).items()
    assert {"dtype"} == {f.name for f in dataclasses.fields(EngineConfig)} - dict(changed).keys()


def test_a_config_file_is_below_the_command_line_and_above_the_defaults(monkeypatch, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 8k\nmax_num_seqs: 4\nserved-model-name: [a, b]\noverlap: false")
    args = ("--config", file, "--max-num-seqs", "5")
    _, source = serve_options(monkeypatch, *args)
    engine = source.engine
    assert (engine.max_model_len, engine.max_num_seqs, engine.page_size) == (8000, 5, 64)
    assert source.names == ["a", "b"] and not engine.overlap
    file.write_text("no-overlap: true\nno-prefix-cache: true\ndeterministic: true")
    _, source = serve_options(monkeypatch, "--config", file, "--prefix-cache", "--no-deterministic")
    engine = source.engine
    assert (engine.overlap, engine.prefix_cache, engine.deterministic) == (False, True, False)
    for text, words_of_error in (
        ("max-num-seq: 4", "did you mean max-num-seqs?"),
        ("no-overlap: 3", "no-overlap is 3; it is true or false"),
        ("swap-space: 4", "swap-space: use --kv-offload-gib"),
        ("- 4", "must hold options"),
        ("a: [", "cannot be read"),
        ("max-model-len: 8q", "is not a number such as"),
        ("model: x", "give the model as an argument"),
    ):
        file.write_text(text)
        result = run("serve", "m", "--config", file)
        assert result.exit_code == 2 and words_of_error in words(result), result.output
    assert run("serve", "m", "--config", tmp_path / "none.yaml").exit_code == 2


def test_help_is_grouped_and_imports_no_jax():
    script = (
        "import sys; from jaxinfer_service.cli import app\n"
        "try: app(['--help'], prog_name='jaxinfer')\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'tokenizers', 'grpc', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for word in ("Run a model", "Watch", "Checkpoints", "Measure", "serve", "top", "bench"):
        assert word in done.stdout
    bench = run("bench", "--help")
    assert bench.exit_code == 0 and {"throughput", "serve"} <= set(bench.output.split())


def test_the_package_and_the_client_import_no_jax():
    script = (
        "import sys, jaxinfer, jaxinfer_service.client\n"
        "jaxinfer.SamplingParams(temperature=0)\n"
        "heavy = {'jax', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=ENVIRONMENT)


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_are_structured(form, capsys):
    console.set_up_logging("info", form)
    logging.getLogger("jaxinfer.x").info("ready", extra={"port": 5, "name_of": "a b"})
    logging.getLogger("jaxinfer.x").debug("not shown")
    logging.getLogger("other").info("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    if form == "json":
        record = json.loads(line)
        assert (record["message"], record["port"], record["level"]) == ("ready", 5, "info")
    else:
        assert line.endswith("INFO ready port=5 name_of=a b")
    with pytest.raises(typer.BadParameter):
        console.set_up_logging("loud", form)


def test_the_reason_of_an_end_is_a_line_of_the_log(capsys):
    for form in ("json", "text"):
        console.set_up_logging("error", form)
        with pytest.raises(typer.Exit) as ended:
            console.fail(ValueError("it burns"), 3)
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.exit_code == 3
        if form == "json":
            assert (
                json.loads(line)["message"] == "it burns" and json.loads(line)["level"] == "error"
            )
        else:
            assert line == "jaxinfer: it burns"


# -- generate, convert, inspect ------------------------------------------------------------------


def test_generate_prints_json_or_streams_the_same_text(tiny):
    args = ("generate", tiny, "--prompt", "the a", "--max-new-tokens", "8", "--ignore-eos", *TINY)
    result = run(*args, "--json", "--logprobs", "2", "--prompt", "in")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert len(first["token_ids"]) == 8 and first["finish_reason"] == "length"
    assert first["prompt_token_ids"] and second["prompt_token_ids"] != first["prompt_token_ids"]
    assert set(first["timing"]) == {"queued", "first_token", "total"}
    assert len(first["logprobs"]) == 8 and len(first["logprobs"][0]["top"]) == 2
    assert first["cached_tokens"] == 0 and first["more"] == []
    plain = run(*args)
    assert plain.exit_code == 0 and plain.stdout == first["text"] + "\n"


def test_generate_reports_bad_input_in_one_line(tiny):
    result = run("generate", tiny, "-p", "the", "--temperature", "-1", *TINY)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("jaxinfer: temperature: is -1.0;")
    missing = run("generate", "/nowhere/model", "-p", "x")
    assert missing.exit_code == 1
    assert missing.stderr.splitlines()[-1].startswith("jaxinfer: /nowhere/model does not exist")
    parallel = run("generate", tiny, "-p", "x", "--tensor-parallel-size", "64", *TINY)
    assert parallel.exit_code == 1 and "tensor_parallel_size = 64" in parallel.stderr
    assert run("generate", tiny, "-p", "x", "--logprobs", "2").exit_code == 2


def test_convert_and_inspect(tiny, tmp_path):
    target = tmp_path / "orbax"
    result = run("convert", tiny, target, "--dtype", "float32")
    assert result.exit_code == 0 and f"jaxinfer serve {target}" in result.stdout
    again = run("convert", tiny, target)
    assert again.exit_code == 1 and "exists already" in again.stderr
    facts = json.loads(run("inspect", target, "--json").stdout)
    assert facts["config"]["family"] == "llama" and facts["dtype"] == "float32"
    assert "GiB, float32" in run("inspect", target, "--device-memory", "1GiB").stdout
    assert run("inspect", tmp_path / "nothing").exit_code == 1


def test_inspect_says_what_is_missing(tmp_path):
    folder = hf_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    facts = json.loads(run("inspect", folder, "--json").stdout)
    assert facts["parameters"] > 0 and facts["tokenizer_size"] == 0
    assert facts["missing"].startswith(f"{folder}/tokenizer.json: missing")
    assert "missing" in run("inspect", folder).stdout
    for command in (("convert", folder, tmp_path / "x"), ("generate", folder, "-p", "x")):
        result = run(*command)
        assert result.exit_code == 1 and "tokenizer.json: missing" in result.stderr


# -- chat ----------------------------------------------------------------------------------------


def test_chat_works_piped():
    said = []

    def script(request):
        said.append(bytes(request.prompt).decode())
        return says("yes")(request)

    wide = limits(max_model_len=1000, kv_tokens=1000)
    with server_thread(ScriptedEngine(script, wide)) as address:
        lines = "one\n\ntwo\n/nonsense\n/reset\nthree\n/quit\nfour\n"
        done = in_process("chat", "--server", address, "--system", "S", input=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "yes\nyes\nyes\n"
    assert "/nonsense is no command" in done.stderr
    assert said == [
        "system: S\nuser: one\nassistant:",
        "system: S\nuser: one\nassistant: yes\nuser: two\nassistant:",
        "system: S\nuser: three\nassistant:",
    ]


def test_chat_says_how_urgent_and_whose_it_is():
    seen = []

    def script(request):
        seen.append(request.scheduling)
        return says("yes")(request)

    with server_thread(ScriptedEngine(script)) as address:
        chat = ("chat", "--server", address)
        assert in_process(*chat, "--priority", 7, "--tenant", "t", input="hi").stdout == "yes\n"
        assert in_process(*chat, input="hi").returncode == 0
        wrong = in_process(*chat, "--priority", 1001, input="hi")
    assert seen == [Scheduling(7, "t"), Scheduling()]
    assert wrong.returncode == 2 and "1000" in wrong.stderr


@pytest.mark.parametrize(("role", "drawn"), [("inference", 1.0), ("admin", 0.7)])
def test_chat_leaves_to_the_model_what_a_key_may_not_know(tmp_path, monkeypatch, role, drawn):
    """A model's own temperature must not be overruled because the server does not tell it."""
    seen = []

    def script(request):
        seen.append(request.params.temperature)
        return says("yes")(request)

    key, digest = make_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{name: a, sha256: {digest}, roles: [{role}]}}]")
    monkeypatch.setitem(ENVIRONMENT, "JAXINFER_API_KEY", key)
    with server_thread(ScriptedEngine(script), client={"api_key": key}, access=Access(file)) as at:
        assert in_process("chat", "--server", at, input="hi").stdout == "yes\n"
    assert seen == [drawn]


def test_chat_without_a_server_and_beyond_its_length():
    done = in_process("chat", "--server", "127.0.0.1:1", input="hi\n")
    assert done.returncode == 1 and "jaxinfer serve demo" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with server_thread(ScriptedEngine(says("x"))) as address:  # 64 tokens
        done = in_process("chat", "--server", address, input="w" * 100 + "\n")
    assert done.returncode == 1 and "at most 63" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("jaxinfer: ")


def test_an_interrupted_answer_is_kept_and_an_error_leaves_no_trace(capsys, monkeypatch):
    wide = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
    engine = ScriptedEngine(forever, wide, step_seconds=0.001)
    with server_thread(engine) as address, Client(address) as client:
        conversation = Conversation(client, "", None, {})
        real, count = typer.echo, iter(range(3))

        def interrupted(text="", **kwargs):
            real(text, **kwargs)
            if kwargs.get("nl") is False and next(count, None) is None:
                monkeypatch.undo()
                raise KeyboardInterrupt

        monkeypatch.setattr(typer, "echo", interrupted)
        assert conversation.ask("hi")
        answer = conversation.messages[1]["content"]
        assert answer.startswith('!"#$') and capsys.readouterr().out == answer + "\n"
        conversation._model = "another"
        assert not conversation.ask("again")
        assert len(conversation.messages) == 2 and "NOT_FOUND" in capsys.readouterr().err
