"""Who runs next. Host only; the same operations in the same order give the same answers.

Strict by priority: the lowest number first. Within one priority, first the sequences that were
preempted, then tenants in turn, least served first (start-time fair queueing, Goyal et al. 1996;
for token counts see Sheng et al. 2024, arXiv:2401.00588), and first come first served within a
tenant. A sequence that waited `ageing` seconds in one priority rises to the next more urgent one
that anybody waits or runs in, so it waits at most `ageing` seconds for each priority in use above
its own, at once or between preemptions, and then its turn among those that rose there, who share
like one tenant: however many they are, those who were asked to be urgent go on having their turns.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from jaxinfer.request import MAX_PRIORITY
from jaxinfer.sequence import NOT_WAITING, Sequence

MOST_RISES = 64  # sequences that may rise in one step, whose time is bounded so
MOST_ACCOUNTS = 4096  # tenants whose service is remembered while they have nothing to do
_RISEN = (False, "")  # their line; of lines with equal service it is the first

_Entry = tuple[int, int, Sequence]  # order of arrival, number of the entry, sequence
Running = Row[Sequence]
_Line = tuple[bool, str]  # True and a tenant; (False, ""): of all that rose to the level


@dataclass(slots=True)
class _Level:
    """The waiting sequences of one priority, in three orders.

    Entries are not searched for when a sequence leaves: an entry is stale, and dropped when it is
    met, unless its number is still the sequence's own.
    """

    size: int = 0
    tokens: int = 0
    preempted: list[_Entry] = field(default_factory=list)  # heap by order of arrival
    lines: dict[_Line, list[_Entry]] = field(default_factory=dict)  # heaps by order of arrival
    share: float = 0.0  # of all these lines together
    # by line: sequences, and prompt tokens that they are to compute
    queued: dict[_Line, tuple[int, int]] = field(default_factory=dict)
    turns: list[tuple[float, _Line]] = field(default_factory=list)  # heap of (service, line)
    # heap by when they came to the level, the time they waited before they ran counted
    entries: list[tuple[float, int, Sequence]] = field(default_factory=list)

    def live(self) -> list[Sequence]:
        ordered = sorted(self.entries, key=lambda entry: entry[:2])
        return [sequence for _, entry, sequence in ordered if sequence.entry == entry]


class WaitingQueue:
    """Sequences that wait for a slot. `weights` are the tenants' shares, 1 if not named; priorities
    from `batch_priority` on are the batch class."""

    def __init__(
        self,
        ageing: float,
        weights: Mapping[str, float] | None = None,
        batch_priority: int = MAX_PRIORITY + 1,
    ):
        self._ageing, self._batch_priority = ageing, batch_priority
        self._crossed = 0  # waiting sequences of the batch class that rose above it
        self._weights = dict(weights or {})
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # the levels in use, most urgent first
        self._service: dict[_Line, float] = {}
        self._clock = 0.0  # service of who always had its share: newcomers start there
        self._most_accounts = 2 * MOST_ACCOUNTS
        self._entries = itertools.count(1)
        self._size = 0
        self.preempted = 0  # of those that wait, how many ran before
        self.held = set[Sequence]()  # those that are aside, in no order, until they are pushed
        self.passed = list[Sequence]()  # over whom `head` passed: their rules are not known yet

    def __len__(self) -> int:
        return self._size + len(self.passed)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences: by priority, then by when they came to it."""
        for number in self._order:
            yield from self._levels[number].live()
        yield from self.passed

    # -- coming and going ------------------------------------------------------------------------

    def push(self, sequence: Sequence, now: float, preempted: bool = False) -> None:
        """Enter `sequence` at its own level; one that was preempted is in front of others."""
        level = self._levels.get(sequence.level)
        if level is None:
            level = self._levels[sequence.level] = _Level()
            bisect.insort(self._order, sequence.level)
        sequence.entry = next(self._entries)
        # The time it waited before it ran counts, else who is preempted often would never rise.
        sequence.entered, sequence.preempted = now - sequence.waited, preempted
        self._count(level, sequence, 1)
        self._line_up(level, sequence)
        if len(level.entries) > 2 * level.size + 64:
            self._drop_stale(level)

    def _line_up(self, level: _Level, sequence: Sequence, known: Collection[_Line] = ()) -> None:
        """`known` are lines that were here already, so their turns stay as they are."""
        entry = (sequence.order, sequence.entry, sequence)
        heapq.heappush(level.entries, (sequence.entered, sequence.entry, sequence))
        name = _line_of(sequence)
        if sequence.preempted and name != _RISEN:
            heapq.heappush(level.preempted, entry)
            return
        line = level.lines.get(name)
        if line is None:
            line = level.lines[name] = []
            level.share += self._share(name)
            if name not in known:
                self._service[name] = max(self.service(sequence), self._clock)
            heapq.heappush(level.turns, (self._service[name], name))
        heapq.heappush(line, entry)

    def _drop_stale(self, level: _Level) -> None:
        members, known = level.live(), level.lines
        level.preempted, level.lines, level.turns = [], {}, []
        level.share, level.entries = 0.0, []
        for sequence in members:
            self._line_up(level, sequence, known)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits, or is held: it was admitted, or ended."""
        if sequence in self.held:
            self.held.remove(sequence)
            return
        if sequence in self.passed:
            self.passed.remove(sequence)
            return
        sequence.entry = NOT_WAITING
        level = self._levels[sequence.level]
        self._count(level, sequence, -1)
        if level.size == 0:
            del self._levels[sequence.level]
            self._order.remove(sequence.level)

    def _count(self, level: _Level, sequence: Sequence, one: int) -> None:
        """One more or one less waits."""
        tokens, line = one * sequence.prompt_len, _line_of(sequence)
        level.size += one
        level.tokens += tokens
        self._size += one
        self.preempted += one * sequence.preempted
        self._crossed += one * self._has_crossed(sequence)
        count, before = level.queued.get(line, (0, 0))
        level.queued[line] = (count + one, before + one * sequence.to_compute)
        if count + one == 0:
            del level.queued[line]

    # -- whose turn it is ------------------------------------------------------------------------

    def head(self) -> Sequence | None:
        """The sequence to run next, or None. It stays in the queue.

        One that ran before and whose grammar is still being followed, since its process began anew
        say, is passed over: nobody waits behind it.
        """
        while self._order:
            level = self._levels[self._order[0]]
            first = _first(level.preempted)
            if first is None:
                first = self._of_least_served(level)
            if first.rules_are_known:
                return first
            self.remove(first)
            self.passed.append(first)
        return None

    def _of_least_served(self, level: _Level) -> Sequence:
        while True:
            served, line = level.turns[0]
            sequence = _first(level.lines[line])
            if sequence is None:
                heapq.heappop(level.turns)
                del level.lines[line]
                level.share -= self._share(line)
            elif served < self._service[line]:  # it was served since
                heapq.heapreplace(level.turns, (self._service[line], line))
            else:
                self._clock = max(self._clock, served)
                return sequence

    def rise(self, now: float, running: Running = (), batch_slots: int | None = None) -> None:
        """Let who waited long enough rise to the level above. To be called once a step.

        `running` are those that run, the most urgent first. No more of the batch class rise above
        it than there are `batch_slots` for; None: all may.
        """
        if len(self._service) > self._most_accounts:
            self._forget_accounts(running)
        for sequence in [each for each in self.passed if each.rules_are_known]:
            self.passed.remove(sequence)
            sequence.waited = now - sequence.entered
            self.push(sequence, now, sequence.preempted)
        left = MOST_RISES
        for number in self._order[::-1]:
            since = self._levels[number].entries[0][0]
            if now - since < self._ageing:
                continue  # the first to rise is not due
            above = self._above(number, running)
            if above is None:
                continue
            room = left
            if batch_slots is not None and above < self._batch_priority <= number:
                room = min(left, batch_slots - self._crossed)
            left -= self._rise_from(number, above, now, room)

    def _above(self, number: int, running: Running) -> int | None:
        """The next more urgent level that anybody waits or runs in."""
        levels = self._order[: bisect.bisect_left(self._order, number)][-1:]
        ahead = bisect.bisect_left(running, number, key=lambda sequence: sequence.level)
        levels += [running[ahead - 1].level] if ahead else []
        return max(levels, default=None)

    def _rise_from(self, number: int, above: int, now: float, room: int) -> int:
        """Let at most `room` sequences rise; returns how many did."""
        level, rises = self._levels[number], 0
        while level.size and rises < room:
            _, entry, sequence = level.entries[0]
            if sequence.entry == entry:
                if now - sequence.entered < self._ageing:
                    break
                self.remove(sequence)
                sequence.level, sequence.waited = above, 0.0
                self.push(sequence, now, sequence.preempted)
                rises += 1
            heapq.heappop(level.entries)
        return rises

    def _has_crossed(self, sequence: Sequence) -> bool:
        """Whether it is of the batch class and rose above it."""
        return sequence.level < self._batch_priority <= sequence.request.scheduling.priority

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(level.tokens for level in list(self._levels.values()))

    def ahead_of(self, sequence: Sequence, running: Running = ()) -> tuple[float, float]:
        """How many sequences, with how many prompt tokens to compute, go before one that came now,
        what is left of the prompts of those that run among them.

        Of other lines at its level, as much as their share is while its own line is served.
        """
        level, line = self._levels.get(sequence.level), _line_of(sequence)
        above = self._order[: bisect.bisect_left(self._order, sequence.level)]
        count = float(sum(self._levels[number].size for number in above))
        lines = (line for number in above for line in self._levels[number].queued.values())
        tokens = float(sum(theirs for _, theirs in lines))
        beside = {} if level is None else dict(level.queued)
        for other_one in running:
            left = other_one.prefill_target - other_one.num_computed_tokens
            if left > 0 and other_one.level < sequence.level:
                tokens += left
            elif left > 0 and other_one.level == sequence.level:
                waiting, theirs = beside.get(_line_of(other_one), (0, 0))
                beside[_line_of(other_one)] = waiting, theirs + left
        own = beside.get(line, (0, 0))[1] + sequence.to_compute
        for other, (waiting, theirs) in beside.items():
            served = own * self._share(other) / self._share(line)
            part = 1.0 if other == line else min(1.0, served / theirs)  # each has one at least
            count, tokens = count + part * waiting, tokens + part * theirs
        return count, tokens

    def more_urgent(self, level: int) -> int:
        """How many wait at levels above `level`."""
        above = self._order[: bisect.bisect_left(self._order, level)]
        return sum(self._levels[number].size for number in above)

    # -- service ---------------------------------------------------------------------------------

    def charge(self, sequences: list[Sequence], tokens: int) -> None:
        """Enter `tokens` that are computed for each of these into their lines' accounts."""
        service, clock = self._service, self._clock
        for sequence in sequences:
            line, level = _line_of(sequence), self._levels.get(sequence.level)
            share = beside = self._share(line) if self._weights else 1.0
            if level is not None and level.share > share:
                beside = level.share
            served = service.get(line, clock) + tokens / share
            # Those who wait beside it wait for their part of it, whoever else may come.
            clock += tokens / beside
            # Of a line whose last one runs, each part of the prompt comes as a newcomer would.
            waits = level is not None and line in level.queued
            service[line] = served if waits or served > clock else clock
        self._clock = clock

    def _share(self, line: _Line) -> float:
        return self._weights.get(line[1], 1.0) if line[0] else 1.0

    def service(self, sequence: Sequence) -> float:
        """Tokens computed for a sequence's line by its share, counted from when it came."""
        return self._service.get(_line_of(sequence), self._clock)

    def _forget_accounts(self, running: Running) -> None:
        """Who is not ahead of the queue's clock would start at it anyway."""
        busy = {line for level in self._levels.values() for line in level.lines}
        busy |= {_line_of(sequence) for sequence in running}
        self._service = {
            line: served
            for line, served in self._service.items()
            if line in busy or served > self._clock
        }
        self._most_accounts = 2 * max(MOST_ACCOUNTS, len(self._service))

    def check_invariants(self) -> None:
        """AssertionError unless levels, lines and counts account for each other."""
        assert all(s.entry == NOT_WAITING for s in [*self.held, *self.passed]), "a place is left"
        waiting = [sequence for sequence in self if sequence not in self.passed]
        assert len({id(s) for s in waiting}) == len(waiting) == self._size, "counted twice or lost"
        assert self.tokens == sum(s.prompt_len for s in waiting), "tokens"
        assert self.preempted == sum(s.preempted for s in waiting), "those that ran before"
        assert self._order == sorted(self._levels), "levels"
        assert self._crossed == sum(map(self._has_crossed, waiting)), "those above their class"
        for number, level in self._levels.items():
            members = level.live()
            assert all(s.level == number for s in members), "a level holds another's"
            counts = Counter(map(_line_of, members))
            assert {line: n for line, (n, _) in level.queued.items()} == counts, "counts of lines"
            to_compute = sum(s.to_compute for s in members)
            assert sum(t for _, t in level.queued.values()) == to_compute, "tokens of lines"
            lines = [level.preempted, *level.lines.values()]
            lined = [s for line in lines for _, entry, s in line if s.entry == entry]
            assert {id(s) for s in lined} == {id(s) for s in members}, f"lines of level {number}"
            assert len(lined) == level.size > 0, f"size of level {number}"
            assert sorted(line for _, line in level.turns) == sorted(level.lines), "turns"


def _line_of(sequence: Sequence) -> _Line:
    """Those that rose have one line, so that however many they are, they take turns with others."""
    scheduling = sequence.request.scheduling
    return _RISEN if sequence.level < scheduling.priority else (True, scheduling.tenant)


def _first(line: list[_Entry]) -> Sequence | None:
    """The first of a line that still waits in it."""
    while line:
        _, entry, sequence = line[0]
        if sequence.entry == entry:
            return sequence
        heapq.heappop(line)
    return None
