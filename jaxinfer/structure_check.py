"""Whether structures can be followed: found out before a request starts, in a process of its own.

A grammar that a stranger wrote is read here first, within bounds of time and memory; whoever waits
for it holds no slot, and nobody else waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from jaxinfer.detokenizer import DetokenizerFactory
from jaxinfer.grammar_process import GrammarError, GrammarProcess, Job, Vocabulary
from jaxinfer.request import QueueFullError, RequestError, Violation
from jaxinfer.structured import StructuredOutput
from jaxinfer.tokenizer import Tokenizer

CHECK_SECONDS = 2.0  # of processor time that a grammar may take to be read
MOST_CHECKS = 64  # that wait at a time
KEPT_CHECKS = 1024  # structures that are known to be good
RETRY_SECONDS = 2.0


class StructureChecker:
    """Reads the structures that requests ask for, over the vocabulary of one model."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]):
        self._process = GrammarProcess(vocabulary, CHECK_SECONDS)
        self._good: OrderedDict[StructuredOutput, None] = OrderedDict()

    def check(self, structure: StructuredOutput) -> Future[bytes] | None:
        """What raises GrammarError if there is something wrong; None if it is known that there is
        nothing. Raises QueueFullError when too many are being read.
        """
        if structure in self._good:
            self._good.move_to_end(structure)
            return None
        waiting = self._process.unanswered
        if waiting >= MOST_CHECKS:
            raise QueueFullError(
                f"{waiting} grammars are being read, the limit is {MOST_CHECKS}; retry later",
                RETRY_SECONDS,
            )
        job = Job(0, structure)
        self._process.ask(job)
        return job.mask

    def note(self, structure: StructuredOutput) -> None:
        """It was read, and is good."""
        self._good[structure] = None
        if len(self._good) > KEPT_CHECKS:
            self._good.popitem(last=False)


def refusal(structure: StructuredOutput, error: GrammarError) -> RequestError:
    """What a request gets whose structure was found to be wrong."""
    return RequestError([Violation(f"structured.{structure.kind}", str(error))])


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The bytes of a model's `size` token ids: none for those that its tokenizer does not have."""
    factory = DetokenizerFactory(tokenizer.raw)
    known = min(size, tokenizer.vocab_size)
    tokens = [factory.token_bytes(token) for token in range(known)] + [b""] * (size - known)
    special = [token for token in sorted(factory.special) if token < size]
    return Vocabulary(tokens, special)
