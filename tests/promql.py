"""What a PromQL expression gives, judged by the labels of what is exported."""

from __future__ import annotations

from collections.abc import Mapping

import promql_parser as promql

SCRAPED = frozenset({"instance", "job"})  # labels that Prometheus itself adds

type Labels = frozenset[str]


def labels(expression: str, exported: Mapping[str, Labels]) -> Labels:
    """Labels of the series that an expression gives, from those of the exported samples by name.

    Fails for a sample or a label that is not exported, and where the labels of two sides differ:
    of such an expression Prometheus finds no pairs, and a panel or an alert stays empty.
    """
    found = _labels(promql.parse(expression), exported)
    assert found is not None, f"{expression} is a number"
    return found


def _labels(node: promql.Expr, exported: Mapping[str, Labels]) -> Labels | None:
    """None of a number."""
    match node:
        case promql.NumberLiteral():
            return None
        case promql.ParenExpr():
            return _labels(node.expr, exported)
        case promql.MatrixSelector():
            return _labels(node.vector_selector, exported)
        case promql.VectorSelector():
            assert node.name in exported, f"{node.name} is not exported"
            own = exported[node.name] | SCRAPED
            asked = {matcher.name for matcher in node.matchers.matchers}
            assert asked <= own, f"{node.name} has no {asked - own}"
            return own
        case promql.Call():
            (vector,) = [v for v in (_labels(a, exported) for a in node.args) if v is not None]
            if node.func.name == "histogram_quantile":
                assert "le" in vector, f"{node.prettify()} has lost its buckets"
                return vector - {"le"}
            return vector
        case promql.AggregateExpr():
            return _kept(_labels(node.expr, exported), node)
        case promql.BinaryExpr():
            left, right = _labels(node.lhs, exported), _labels(node.rhs, exported)
            pairs = left is not None and right is not None
            assert node.modifier is None or node.modifier.matching is None, "not judged here"
            assert not pairs or left == right, (
                f"{node.prettify()} pairs series with {left} and series with {right}"
            )
            return right if left is None else left
    raise NotImplementedError(f"{type(node).__name__} is not judged here")


def _kept(given: Labels | None, node: promql.AggregateExpr) -> Labels:
    """What an aggregation leaves of labels."""
    assert given is not None
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    assert named <= given, f"{node.prettify()} has no {named - given}"
    return named if node.modifier.type == promql.AggModifierType.By else given - named
