"""The process that runs llguidance: what it answers, and what strangers can do to it."""

from __future__ import annotations

import json
import os
import signal
import threading

import numpy as np
import psutil
import pytest
from fake_engine import byte_tokenizer

from jaxinfer import grammar_process
from jaxinfer.grammar_process import GrammarError, GrammarProcess, Job
from jaxinfer.request import QueueFullError
from jaxinfer.structure_check import StructureChecker, vocabulary_of
from jaxinfer.structured import StructuredOutput as S

SIZE = 257  # <eos> is the last token, and stands for no text
LONG = 60  # seconds, on a machine that is busy


def vocabulary():
    return vocabulary_of(byte_tokenizer(), SIZE)


@pytest.fixture(scope="module")
def process() -> GrammarProcess:
    return GrammarProcess(vocabulary, seconds=1.0)


def ask(process, structure, output=b"", sequence=0) -> tuple[str, bool]:
    """The characters that may follow, and whether it may end."""
    job = Job(sequence, structure, list(output), len(output))
    process.ask(job)
    bits = np.unpackbits(np.frombuffer(job.mask.result(LONG), np.uint8), bitorder="little")
    assert not bits[256] and not bits[SIZE + 1 :].any()
    return "".join(chr(i) for i in np.flatnonzero(bits[:256])), bool(bits[SIZE])


def test_what_may_follow(process):
    assert ask(process, S.regex("[a-c]x?")) == ("abc", False)
    assert ask(process, S.regex("[a-c]x?"), b"a") == ("x", True)
    assert ask(process, S.regex("a/b"), b"a") == ("/", False)
    assert ask(process, S.choice(["yes", 'n"o', "né", ""])) == ("ny", True)
    assert ask(process, S.choice(["né"]), b"n") == ("\xc3", False)
    assert ask(process, S.json_object()) == ("{", False)
    assert ask(process, S.json_schema({"type": "boolean"})) == ("ft", False)
    assert ask(process, S.json_schema('{"const": 12}'), b"12") == ("", True)
    assert ask(process, S.grammar('start: "a" | "b" start')) == ("ab", False)
    assert ask(process, S.grammar('root ::= "a" | "b" root'), b"ba") == ("", True)


def test_a_sequence_goes_on_where_it_was_and_begins_anew(process):
    form = S.regex("(ab|cd)+")
    assert ask(process, form, sequence=7) == ("ac", False)
    assert ask(process, form, b"a", sequence=7) == ("b", False)
    assert ask(process, form, b"abcd", sequence=7) == ("ac", True)
    process.forget(7)
    assert ask(process, form, b"abc", sequence=7) == ("d", False)
    with pytest.raises(GrammarError):
        ask(process, form, b"abcx", sequence=7)


def test_white_space_in_json_ends():
    """Models that like it would write nothing else."""
    process = GrammarProcess(vocabulary, seconds=1.0)
    assert " " in ask(process, S.json_object(), b"{" + b" " * 39)[0]
    assert " " not in ask(process, S.json_object(), b"{" + b" " * 40)[0]


@pytest.mark.parametrize(
    "structure",
    [
        S.json_schema("{"),
        S.json_schema('{"type": "nope"}'),
        S.json_schema({"not": {"type": "string"}}),  # a keyword that cannot be followed
        S.json_schema({"$ref": "http://example.org/schema"}),
        S.json_schema("[" * 100_000),
        S.json_schema('{"items":' * 1000 + "{}" + "}" * 1000),
        S.regex("a("),
        S.regex("(?=a)b"),
        S.grammar("nonsense"),
        S.grammar("start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
        S.grammar("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
        S.choice(["a"] * 100_000),
    ],
    ids=lambda structure: f"{structure.kind} {structure.source[:20]}",
)
def test_what_is_no_grammar_is_told(process, structure):
    try:
        ask(process, structure)
    except GrammarError as error:
        assert 0 < len(str(error)) < 1000 and "no_forcing" not in str(error)
    else:
        assert structure.kind == "choice"  # many of them are none too many
    assert ask(process, S.regex("a")) == ("a", False)


DOUBLING = S.grammar("start: R\nR: " + " & ".join(f"/.*[ab].{{{i}}}/" for i in range(1, 30)))


def test_what_takes_too_long_is_ended_and_the_others_go_on(process):
    """Reading this doubles its time with every part."""
    jobs = [Job(0, S.regex(f"a{{{i}}}")) for i in range(1, 5)]
    slow = Job(0, DOUBLING)
    for job in (jobs[0], slow, *jobs[1:]):
        process.ask(job)
    for job in jobs:
        assert job.mask.result(LONG)
    with pytest.raises(GrammarError, match="more than 1 s of processor time"):
        slow.mask.result(LONG)
    again = Job(0, DOUBLING)
    process.ask(again)
    with pytest.raises(GrammarError, match="before"):
        again.mask.result(0)  # at once: it is known
    assert ask(process, S.regex("(a{1000}){1000}")) == ("a", False)  # which only looks bad


def test_who_ends_the_process_fails_alone(process, monkeypatch, tmp_path):
    """A worker that dies of one source, without a word, as of an overflow of its stack."""
    worker = tmp_path / "worker.py"
    source = grammar_process.WORKER.read_text()
    fatal = '        if source == "fatal":\n            os.kill(os.getpid(), 9)\n'
    mark = "        matcher = self._matchers.get(sequence)\n"
    assert mark in source
    worker.write_text(source.replace(mark, fatal + mark, 1))
    monkeypatch.setattr(grammar_process, "WORKER", worker)
    process = GrammarProcess(vocabulary, seconds=5.0)
    good = [Job(i, S.regex(f"b{{{i}}}"), [98], 1) for i in range(2, 8)]
    bad = Job(0, S.regex("fatal"))
    for job in (*good[:3], bad, *good[3:]):
        process.ask(job)
    for job in good:
        assert job.mask.result(LONG)
    with pytest.raises(GrammarError, match="ended the process"):
        bad.mask.result(LONG)
    assert ask(process, S.regex("[xy]z"), b"x", sequence=9) == ("z", False)


def test_a_process_that_is_killed_is_started_again(process):
    assert ask(process, S.regex("ab"), b"a", sequence=3) == ("b", False)
    for child in psutil.Process().children():
        if str(grammar_process.WORKER) in child.cmdline():
            os.kill(child.pid, signal.SIGKILL)
    assert ask(process, S.regex("abc"), b"ab", sequence=3) == ("c", False)


def test_a_worker_that_cannot_start_is_told(monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text("import nothing_of_this_name")
    monkeypatch.setattr(grammar_process, "WORKER", broken)
    with pytest.raises(GrammarError, match="does not start"):
        ask(GrammarProcess(vocabulary, seconds=1.0), S.regex("a"))


def test_a_fault_on_our_side_is_told_and_no_job_hangs():
    process = GrammarProcess(lambda: [][0], seconds=1.0)
    for _ in range(2):  # it is tried again
        with pytest.raises(GrammarError, match="cannot be computed: IndexError"):
            ask(process, S.regex("a"))


def test_llguidance_is_named_when_it_is_missing(monkeypatch):
    monkeypatch.setattr(grammar_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GrammarError, match="pip install llguidance"):
        ask(GrammarProcess(vocabulary, seconds=1.0), S.regex("a"))


def test_few_structures_are_read_at_a_time():
    checker, gate = StructureChecker(vocabulary), threading.Event()
    checker._process._vocabulary = lambda: gate.wait(LONG) and vocabulary()
    readings = [checker.check(S.regex(f"a{{{i}}}")) for i in range(1, 65)]
    with pytest.raises(QueueFullError, match="64 grammars"):
        checker.check(S.regex("b"))
    gate.set()
    for reading in readings:
        reading.result(LONG)
    checker.note(S.regex("b"))
    assert checker.check(S.regex("b")) is None  # known to be good


def test_a_schema_may_be_given_as_text_or_as_a_mapping():
    schema = {"type": "string", "pattern": "é"}
    given = S.json_schema(schema)
    assert json.loads(given.source) == schema and S.json_schema(given.source) == given
    with pytest.raises(ValueError, match="no JSON"):
        S.json_schema({"const": object()})
