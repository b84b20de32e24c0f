"""`jaxinfer eval`: a model against a reference, a verdict, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Group
from rich.table import Table

from jaxinfer.engine import Engine
from jaxinfer.evaluation.cases import Case, answers
from jaxinfer.evaluation.divergence import Divergence, compare
from jaxinfer.llm import LLM


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the model must keep. None: whatever it is.

    Attributes:
        max_kl: of the mean over all positions.
        min_top1: share of positions with the same most likely token.
        max_lost: cases that the reference answers and the model does not.
    """

    max_kl: float | None = None
    min_top1: float | None = None
    max_lost: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A case, and what both said."""

    case: Case
    answer: str
    reference: str

    @property
    def lost(self) -> bool:
        return self.case.passes(self.reference) and not self.case.passes(self.answer)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All that was found; `problems` are the thresholds that it misses, in words."""

    total: Divergence
    by_text: list[Divergence]
    cases: list[Answered] = field(default_factory=list)
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **self.total.to_json(),
            "texts": [text.to_json() for text in self.by_text],
            "cases": [
                {
                    "name": a.case.name,
                    "passes": a.case.passes(a.answer),
                    "reference_passes": a.case.passes(a.reference),
                    "answer": a.answer,
                    "reference_answer": a.reference,
                }
                for a in self.cases
            ],
            "problems": list(self.problems),
        }


def evaluate(
    model: LLM,
    reference: LLM,
    texts: Sequence[str],
    cases: Sequence[Case],
    thresholds: Thresholds,
    max_tokens: int,
) -> Evaluation:
    """Compare them over texts, in the reference's tokens, at most so many of each; and over cases.

    Raises ValueError where they cannot be compared.
    """
    most = min(max_tokens, *(llm.engine.limits.max_model_len for llm in (model, reference)))
    tokens = [reference.tokenizer.encode(text, True)[:most] for text in texts]
    total, by_text = compare(cast(Engine, model.engine), cast(Engine, reference.engine), tokens)
    found = [
        Answered(*each)
        for each in zip(cases, answers(model, cases), answers(reference, cases), strict=True)
    ]
    lost = sum(a.lost for a in found)
    problems = []
    if thresholds.max_kl is not None and not total.kl <= thresholds.max_kl:
        problems.append(f"KL is {total.kl:.3g}, above {thresholds.max_kl:g}")
    if thresholds.min_top1 is not None and not total.top1 >= thresholds.min_top1:
        problems.append(f"top-1 agreement is {total.top1:.3f}, below {thresholds.min_top1:g}")
    if thresholds.max_lost is not None and lost > thresholds.max_lost:
        problems.append(f"{lost} cases lost, more than {thresholds.max_lost}")
    return Evaluation(total, by_text, found, tuple(problems))


def describe(evaluation: Evaluation, names: Sequence[str]) -> Group:
    """Tables of the figures, and of the cases that the two answer differently."""
    figures = Table("text", "positions", "KL", "top-1", "perplexity", "of the reference")
    rows = [*zip(names, evaluation.by_text, strict=True), ("all", evaluation.total)]
    for name, d in rows:
        figures.add_row(
            name,
            str(d.positions),
            f"{d.kl:.3g}",
            f"{d.top1:.1%}",
            f"{d.perplexity:.3f}",
            f"{d.reference_perplexity:.3f}",
        )
    if not evaluation.cases:
        return Group(figures)
    passed = sum(a.case.passes(a.answer) for a in evaluation.cases)
    before = sum(a.case.passes(a.reference) for a in evaluation.cases)
    count = len(evaluation.cases)
    title = f"cases: {passed} of {count} answered, {before} by the reference"
    table = Table("case", "answer", "reference", title=title, title_justify="left")
    for a in evaluation.cases:
        if a.case.passes(a.answer) != a.case.passes(a.reference):
            table.add_row(a.case.name, *(_shown(a.case, text) for text in (a.answer, a.reference)))
    return Group(figures, table if table.row_count else title)


def _shown(case: Case, answer: str) -> str:
    return ("right: " if case.passes(answer) else "wrong: ") + repr(answer.strip()[:40])
