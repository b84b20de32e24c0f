"""What is wrong with a request, collected field by field."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from jaxinfer.request import RequestError, Violation


class Violations(list[Violation]):
    """Violations found so far."""

    def add(self, field: str, message: str) -> None:
        self.append(Violation(field, message))

    def raise_if_any(self) -> None:
        if self:
            raise RequestError(list(self))

    def number(
        self, field: str, value: Any, low: float, high: float, *, open_low: bool = False
    ) -> bool:
        """Require a finite number in [low, high], or (low, high] if `open_low`."""
        interval = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
        if not is_number(value):
            self.add(field, f"is {value!r}; it must be a number {interval}")
        elif not (low < value if open_low else low <= value) or not value <= high:  # NaN fails too
            self.add(field, f"is {value}; it must be {interval}")
        else:
            return True
        return False

    def integer(self, field: str, value: Any, low: int, high: int | None, why: str = "") -> bool:
        """Require an int in [low, high]; `high` None is unbounded. `why` says where it is from."""
        interval = f"at least {low}" if high is None else f"from {low} to {high}"
        if not is_int(value):
            self.add(field, f"is {value!r}; it must be an integer {interval}{why}")
        elif value < low or (high is not None and value > high):
            self.add(field, f"is {value}; it must be {interval}{why}")
        else:
            return True
        return False


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_token_ids(found: Violations, field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Require every id in [0, vocab_size); reports the first that is not."""
    if (wrong := first_wrong(ids, vocab_size)) is not None:
        found.add(f"{field}[{wrong}]", id_range(ids[wrong], vocab_size))


def first_wrong(ids: Sequence[int], vocab_size: int) -> int | None:
    """Where the first thing is that is no token id."""
    wrong = (i for i, t in enumerate(ids) if not (is_int(t) and 0 <= t < vocab_size))
    return next(wrong, None)


def id_range(token: Any, vocab_size: int) -> str:
    return f"is {token!r}; token ids of this model are from 0 to {vocab_size - 1}"
