"""How fast steps and requests go, learned from the steps themselves. Host only, no clock.

Answers two questions: how many prompt tokens fit beside the running streams so that they keep
their time between tokens, and when a request that comes now can expect its first token.
"""

from __future__ import annotations

import logging

from jaxinfer.step_plan import StepPlan

logger = logging.getLogger(__name__)

SMALLEST_CHUNK = 64  # tokens; the chunk is chosen among halves of the largest, down to this
STARVED_STEPS = 8  # steps without a chunk after which the smallest goes, whatever the bound says
LEARNING = 0.2  # weight of the newest step
END_LEARNING = 0.1  # weight of the newest end: these vary more than steps
SURE_STEPS = 32  # decoding steps in a row, beyond the bound, after which it is said


class Pace:
    """Times of steps, by what was in them. Times are in seconds."""

    def __init__(self, chunk_tokens: int, tpot_target: float | None, one_size: bool = False):
        self.tpot_target = tpot_target
        self._sizes = [chunk_tokens]  # the chunks to choose from, largest first
        while not one_size and self._sizes[-1] >= 2 * SMALLEST_CHUNK:
            self._sizes.append(self._sizes[-1] // 2)
        self._decode_times: dict[int, float] = {}  # by number of rows, as a power of two
        self._token_time: float | None = None  # of a prompt token beside whatever decodes
        self._credit = 0.0  # what the last steps left of the bound, or took beyond it
        self._starved = 0
        self._beyond: dict[int, int] = {}  # by rows: steps in a row that only decoded, too slowly
        self._said = False
        self._slots = SlotTimes()

    # -- what is learned ---------------------------------------------------------------------------

    def expect(self, decodes: int, chunk: int, streams: int) -> float:
        """A step was planned: what it will take counts at once, since it is read much later.

        `streams` wait for a token meanwhile; they get one if there are `decodes`. Returns the
        seconds expected, to be given to `observe`.
        """
        seconds = self._decode_time(decodes)
        if chunk:
            seconds += self._size(chunk) * (self._token_time or 0.0)
        if streams and self.tpot_target is not None:
            self._enter((self.tpot_target if decodes else 0.0) - seconds)
        return seconds

    def observe(
        self,
        decodes: int,
        chunk: int,
        ends: int,
        seconds: float,
        expected: float = 0.0,
        running: int = 0,
    ) -> None:
        """A step of so many decode rows and prompt tokens took this long; so many ended in it of
        those `running`, who are at least as many as decode."""
        if seconds <= 0:
            return
        if decodes and self.tpot_target is not None:
            self._enter(expected - seconds)
        if chunk:
            extra = max(0.0, seconds - self._decode_time(decodes)) / self._size(chunk)
            self._token_time = _blend(self._token_time, extra)
        else:
            rung = _rung(decodes)
            self._decode_times[rung] = _blend(self._decode_times.get(rung), seconds)
            self._check_bound(decodes, self._decode_times[rung])
        self._slots.observe(max(running, decodes), ends, seconds)

    def _check_bound(self, decodes: int, seconds: float) -> None:
        """Say it once if no choice of chunks can keep the bound."""
        if self.tpot_target is None or self._said or not decodes:
            return
        rung = _rung(decodes)
        slow = seconds > self.tpot_target
        self._beyond[rung] = self._beyond.get(rung, 0) + 1 if slow else 0
        if self._beyond[rung] > SURE_STEPS:
            self._said = True
            logger.warning(
                "a step that only decodes takes %.1f ms with %d stream%s, more than the bound of "
                "%.1f ms: prompts are computed slowly for it, and it is not kept; raise "
                "--tpot-target-ms%s",
                1e3 * seconds,
                decodes,
                "" if decodes == 1 else "s",
                1e3 * self.tpot_target,
                "" if decodes == 1 else " or lower --max-num-seqs",
            )

    def _enter(self, seconds: float) -> None:
        """Time gained against the bound, or lost. What was gained is not saved up for long."""
        if self.tpot_target is not None:
            credit = self._credit + seconds
            self._credit = min(max(credit, -4 * self.tpot_target), self.tpot_target)

    def _size(self, chunk: int) -> int:
        """Tokens that a chunk is computed as."""
        return min((size for size in self._sizes if size >= chunk), default=self._sizes[0])

    def _decode_time(self, rows: int) -> float:
        """Of a step that decodes only; that of the nearest size known if this one is not."""
        if not rows or not self._decode_times:
            return 0.0
        rung = _rung(rows)
        if rung in self._decode_times:
            return self._decode_times[rung]
        nearest = min(self._decode_times, key=lambda known: (abs(known - rung), known))
        return self._decode_times[nearest]

    # -- what it is good for -----------------------------------------------------------------------

    def chunk_budget(self, streams: int) -> int:
        """Prompt tokens the next step may compute while `streams` wait for a token."""
        if self.tpot_target is None or not streams:
            return self._sizes[0]
        if self._token_time is None:
            return self._sizes[-1]  # the first chunk shows what a token costs
        spare = self.tpot_target + self._credit - self._decode_time(streams)
        fitting = [size for size in self._sizes if size * self._token_time <= spare]
        if fitting:
            return fitting[0]
        return self._sizes[-1] if self._starved >= STARVED_STEPS else 0

    def note_chunk(self, wanted: bool, tokens: int) -> None:
        """Whether a prompt waited to be computed, and how much of it was in the step planned."""
        self._starved = self._starved + 1 if wanted and not tokens else 0

    def first_token_in(
        self, tokens_ahead: float, ends_awaited: float = 0.0, running: int = 0
    ) -> float:
        """Seconds until a request has its first token, as far as is known: 0 knows nothing.

        `tokens_ahead` are prompt tokens to compute until then, its own included, beside the
        `running` sequences; `ends_awaited` how many of these must end before there is room for it.
        """
        wait = self._slots.until(ends_awaited, running)
        if self._token_time is None:
            return wait
        steps = max(1.0, tokens_ahead / self._mean_chunk(running))
        return wait + tokens_ahead * self._token_time + steps * self._decode_time(running)

    def _mean_chunk(self, streams: int) -> float:
        """Prompt tokens a step, of many steps that have as many as they may."""
        largest = float(self._sizes[0])
        if self.tpot_target is None or not streams or not self._token_time:
            return largest
        spare = self.tpot_target - self._decode_time(streams)
        least = self._sizes[-1] / (STARVED_STEPS + 1)
        return min(largest, max(least, spare / self._token_time))


class SlotTimes:
    """How long sequences keep their slots, learned from their ends. Few that run say by it how soon
    many will end. Times are in seconds."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._since_end = 0.0  # of all that ran since the last end, together

    def observe(self, running: int, ends: int, seconds: float) -> None:
        """So many ran for this long, and so many of them ended then."""
        self._since_end += running * seconds
        for _ in range(ends):
            self._mean = _blend(self._mean, self._since_end / ends, END_LEARNING)
        if ends:
            self._since_end = 0.0

    def until(self, ends: float, running: int) -> float:
        """Seconds until so many of those `running` or of those that follow them have ended; 0 as
        long as nothing is known."""
        if self._mean is None or not running:
            return 0.0
        # An end that does not come is news, of the next one: who began together ends together.
        late = min(ends, 1.0) * max(0.0, self._since_end - self._mean)
        return (ends * self._mean + late) / running


class StepWatch:
    """Tells `Pace` what each step took: the time from one plan to the next, for the step that was
    read between them."""

    def __init__(self, pace: Pace):
        self._pace = pace
        self._planned: float | None = None  # when the last step was, unless there was none
        self._read: StepPlan | None = None
        self._ends = 0

    def planning(self, now: float) -> None:
        """A step is about to be planned."""
        if self._planned is not None and (step := self._read) is not None:
            self._pace.observe(
                len(step.decodes), step.chunk_tokens, self._ends, now - self._planned,
                step.expected, step.running,
            )  # fmt: skip
        self._planned, self._read, self._ends = now, None, 0

    def read(self, step: StepPlan, more: bool) -> None:
        """A step was read. The time until somebody comes, if there is no `more`, is no step's."""
        self._read = step
        if not more:
            self.idle()

    def ended(self) -> None:
        """A sequence ended."""
        self._ends += 1

    def idle(self) -> None:
        """There was nothing to plan."""
        self._planned = None


def _rung(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()


def _blend(old: float | None, new: float, weight: float = LEARNING) -> float:
    return new if old is None else old + weight * (new - old)
