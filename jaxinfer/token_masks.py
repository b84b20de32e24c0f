"""The engine's side of token rules: what each row of a step may take, found while the device works.

A structure's masks come from another process (`grammar_process.py`). Nobody waits for them longer
than the device is busy anyway: a row whose mask is not known by then sits the step out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from jaxinfer.grammar_process import GrammarError, GrammarProcess, Job, Vocabulary
from jaxinfer.structured import StructuredOutput
from jaxinfer.token_rules import SequenceRules, TokenRules

MASK_SECONDS = 3.0  # of processor time that one mask may take, a grammar's first reading included
GRAIN_SECONDS = 0.0005  # how often is asked whether the device is done
MOST_GRAINS = 100  # of waiting, where a step has nothing but rows that wait


class TokenMasks:
    """Gives sequences their rules. One engine owns it; the process is started when it is needed."""

    def __init__(self, vocab_size: int, vocabulary: Callable[[], Vocabulary]):
        self._vocab_size = vocab_size
        self._process = GrammarProcess(vocabulary, MASK_SECONDS)
        self._numbers = itertools.count(1)

    def rules(self, rules: TokenRules) -> SequenceRules:
        """The rules of a new sequence; what its first token may be is being computed."""
        if rules.structure is None:
            return SequenceRules(rules, self._vocab_size)
        grammar = FollowedGrammar(self._process, self._numbers, rules.structure)
        return SequenceRules(rules, self._vocab_size, grammar)


class FollowedGrammar:
    """One sequence's place in its grammar, which the process keeps."""

    def __init__(
        self, process: GrammarProcess, numbers: Iterator[int], structure: StructuredOutput
    ):
        self._process, self._structure, self._numbers = process, structure, numbers
        self._sequence = next(numbers)
        self._output: list[int] = []
        self._next: Future[bytes] = Future()
        self._ask()

    def follow(self, output: Sequence[int]) -> None:
        """Ask what may come after this output, which has grown since, or begun anew."""
        known = len(self._output)
        if len(output) < known:
            self._output, known = [], 0
            self._process.forget(self._sequence)
            self._sequence = next(self._numbers)  # of the old one a job may be on its way
        self._output += output[known:]
        self._ask()

    def _ask(self) -> None:
        job = Job(self._sequence, self._structure, self._output, len(self._output))
        self._next = job.mask
        self._process.ask(job)

    def wait(self, timeout: float) -> bool:
        """Whether it is known what may follow, after so many seconds."""
        if not self._next.done() and timeout != 0:
            try:
                self._next.exception(timeout)
            except TimeoutError:
                return False
        return self._next.done()

    def mask(self) -> np.ndarray:
        """uint32: a bit a token, and one more for the end. Raises GrammarError."""
        try:
            return np.frombuffer(self._next.result(0), np.uint32)
        except GrammarError as error:
            raise GrammarError(f"structured: {error}") from error

    def forget(self) -> None:
        """The sequence has ended."""
        self._process.forget(self._sequence)


def wait_for(
    rules: Iterable[SequenceRules], others: bool, device_is_done: Callable[[], bool]
) -> None:
    """Wait for masks until all are known, or the device is done and somebody can go on without;
    nobody waits for ever. `others`: rows whose mask is known or that need none are in the step.
    """
    waited = [r for r in rules if not r.are_known]
    grains = MOST_GRAINS
    while waited and grains:
        grains -= 1
        if waited[0].wait(GRAIN_SECONDS):
            others = True
            waited = [r for r in waited if not r.are_known]
        if others and device_is_done():
            return
