"""A model against a reference: distributions of the engine's own programs, cases, the verdict."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import numpy as np
import pytest
from jaxinfer_service.cli import app
from test_quantisation import QUANTISED
from tiny_engine import VOCAB, Setup, drive, engine_for, naive_logits, request, tiny_params
from typer.testing import CliRunner

from jaxinfer.evaluation import evaluate as evaluation
from jaxinfer.evaluation.cases import (
    DEFAULT_CASES,
    DEFAULT_TEXTS,
    Case,
    answers,
    read_cases,
    read_texts,
)
from jaxinfer.evaluation.distributions import distributions
from jaxinfer.evaluation.divergence import Divergence, compare
from jaxinfer.evaluation.evaluate import Thresholds, evaluate

LENGTHS = (2, 40, 9, 17, 33, 5, 8, 21, 12, 3)  # more texts than pages hold at once


@pytest.fixture(autouse=True)
def logging_stays(monkeypatch):
    """Commands set up logging for the whole process."""
    monkeypatch.setattr("jaxinfer_service.cli.console.set_up_logging", lambda level, form: None)


def texts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]


def test_every_position_has_the_engines_own_distribution():
    engine = engine_for(QUANTISED)
    found = {(text, position): logits for text, position, logits in distributions(engine, texts())}
    expected = [(i, p) for i, n in enumerate(LENGTHS) for p in range(min(8, n - 1, 4) - 1, n - 1)]
    assert sorted(found) == expected
    params = tiny_params(quantization=QUANTISED.quantization)
    for i in (0, 1, 8):
        wanted = naive_logits(texts()[i], params)
        for (text, position), logits in found.items():
            if text == i:
                np.testing.assert_allclose(logits, wanted[position], atol=2e-3)
    # It leaves nothing behind.
    (output,) = drive(engine, [request("r", [1, 2, 3], 8)]).values()
    (alone,) = drive(engine_for(QUANTISED), [request("r", [1, 2, 3], 8)]).values()
    assert output.tokens == alone.tokens


def test_divergence_is_what_it_says():
    plain, rounded = engine_for(Setup()), engine_for(QUANTISED)
    total, by_text = compare(plain, engine_for(Setup()), texts())
    assert (total.kl, total.top1) == (0, 1) and total.nll == total.reference_nll
    total, by_text = compare(rounded, plain, texts())
    assert 1e-7 < total.kl < 0.01 and 0.8 < total.top1 <= 1
    kl, nll, count = [], [], 0
    for i, position, logits in distributions(rounded, texts()):
        other = naive_logits(texts()[i])[position].astype(np.float64)
        found = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
        other -= np.log(np.exp(other).sum())
        kl.append((np.exp(other) * (other - found)).sum())
        nll.append(-found[texts()[i][position + 1]])
        count += 1
    assert total.positions == count == sum(text.positions for text in by_text)
    assert total.kl == pytest.approx(np.mean(kl), rel=0.05)
    assert total.nll == pytest.approx(np.mean(nll), rel=1e-6)
    assert total.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-6)


def test_texts_that_cannot_be_evaluated_are_named():
    with pytest.raises(ValueError, match="text 2 has 1 tokens; 2 to 128"):
        list(distributions(engine_for(Setup()), [[1, 2], [3]]))
    other = engine_for(Setup())
    other.limits = dataclasses.replace(other.limits, vocab_size=7)
    with pytest.raises(ValueError, match="300 tokens, the reference 7"):
        compare(engine_for(Setup()), other, [[1, 2]])


# -- cases and texts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "answer", "passes"),
    [
        (Case("", any=("Paris",)), " it is PARIS, of course", True),
        (Case("", any=("Paris", "Lutetia")), "Lyon", False),
        (Case("", all=("a", "b")), "b a", True),
        (Case("", all=("a", "b")), "b c", False),
        (Case("", starts="12"), " 12, 14", True),
        (Case("", starts="12"), "1, 12", False),
        (Case("", exact="yes"), " Yes\n", True),
        (Case("", exact="yes"), "yes!", False),
    ],
)
def test_what_passes(case, answer, passes):
    assert case.passes(answer) is passes


def test_the_default_set_is_of_every_kind():
    cases = read_cases(DEFAULT_CASES)
    assert 20 <= len(cases) <= 30 and len({case.name for case in cases}) == len(cases)
    kinds = {case.name.partition(":")[0] for case in cases}
    assert {"fact", "arithmetic", "code", "translation", "format"} <= kinds
    assert len(read_texts(DEFAULT_TEXTS)) == 8


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "a", "prompt": "\\ud800", "any": ["c"]}', "half of a character"),
        ('{"name": "a", "prompt": "b"}', "one of any, all, starts, exact"),
        ('{"name": "a", "prompt": "b", "chat": "c", "exact": "d"}', "a prompt or a chat"),
        ('{"name": "a", "prompt": "b", "any": "c"}', "any = 'c' is of the wrong kind"),
        ('{"name": "a", "prompt": "b", "any": ["c"], "max_new_tokens": 0}', "max_new_tokens = 0"),
        ('{"name": "a", "promt": "b"}', "'promt' is not one of name, prompt"),
        ("", "has no lines"),
    ],
)
def test_broken_cases_are_named_by_line(tmp_path, line, problem):
    file = tmp_path / "cases.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=problem):
        read_cases(file)


# -- the verdict -------------------------------------------------------------------------------


class Says:
    """An LLM over a real tiny engine, with answers of its own."""

    def __init__(self, setup: Setup, answer: str):
        self.engine, self.answer, self.asked = engine_for(setup), answer, []
        self.tokenizer = types.SimpleNamespace(encode=lambda text, special: list(text.encode()))

    def generate(self, prompts, params):
        self.asked += zip(prompts, params)
        return [types.SimpleNamespace(text=self.answer) for _ in prompts]


CASES = [Case("one", prompt="say", any=("yes",)), Case("two", chat="say", exact="yes")]


def test_the_verdict():
    model, reference = Says(QUANTISED, "no"), Says(Setup(), "yes")
    found = evaluate(model, reference, ["some text", "more of it"], CASES, Thresholds(), 6)
    assert found.problems == () and found.total.positions == 2 * (6 - 4)
    assert [answered.lost for answered in found.cases] == [True, True]
    assert model.asked[1][0] == [{"role": "user", "content": "say"}]
    assert model.asked[0][1] == {"temperature": 0.0, "max_new_tokens": 32}
    strict = Thresholds(max_kl=1e-9, min_top1=1.01, max_lost=1)
    found = evaluate(model, reference, ["some text"], CASES, strict, 6)
    assert len(found.problems) == 3 and "2 cases lost, more than 1" in found.problems
    assert answers(Says(Setup(), "x"), CASES[:1]) == ["x"]


@pytest.mark.parametrize(("kl", "code"), [(0.05, 0), (0.07, 1), (float("nan"), 1)])
def test_the_commands_exit_code(kl, code, monkeypatch, tmp_path):
    opened = []

    def llm(path, **options):
        opened.append((path, options["quantization"], options["kv_dtype"]))
        return types.SimpleNamespace(
            engine=types.SimpleNamespace(limits=types.SimpleNamespace(max_model_len=64)),
            tokenizer=types.SimpleNamespace(encode=lambda text, special: [1, 2, 3]),
            generate=lambda prompts, params: [types.SimpleNamespace(text="x") for _ in prompts],
        )

    one = Divergence(3, kl, 1.0, 2.0, 2.0)
    facts = types.SimpleNamespace(config=types.SimpleNamespace(max_position=64))
    monkeypatch.setattr("jaxinfer.llm.LLM", llm)
    monkeypatch.setattr("jaxinfer.checkpoints.inspect_checkpoint", lambda path: facts)
    monkeypatch.setattr(evaluation, "compare", lambda a, b, texts: (one, [one] * len(texts)))
    options = ["--quantization", "w8a8", "--against-kv-cache-dtype", "bfloat16"]
    result = CliRunner().invoke(app, ["eval", "some", *options])
    assert result.exit_code == code, result.output
    assert opened == [("some", "w8a8", None), ("some", None, "bfloat16")]
    assert ("above 0.06" in result.output) == bool(code)
    for word in ("prose", "perplexity", "0 of 25 answered, 0 by the reference"):
        assert word in result.output
    result = CliRunner().invoke(app, ["eval", "some", "--against", "other", "--json", "--no-cases"])
    fields = json.loads(result.stdout.splitlines()[0])
    assert (fields["against"], fields["cases"], fields["positions"]) == ("other", [], 3)
    refused = CliRunner().invoke(app, ["eval", "some", "--no-cases", "--max-lost", "1"])
    assert refused.exit_code == 2 and "--no-cases leaves nothing" in refused.output
    missing = CliRunner().invoke(app, ["eval", "some", "--texts", str(Path(tmp_path) / "none")])
    assert missing.exit_code == 1 and "cannot be read" in missing.output
