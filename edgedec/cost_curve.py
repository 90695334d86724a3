"""What a draft takes, and the cost curve T(n): the seconds of a forward over n rows, measured and refined by steps."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from edgedec.draft_constants import (
    AS_LONG,
    ATTENDED,
    BUCKET,
    FIRST,
    LOSS_SHARE,
    NEWEST,
    NEXT_TO_NOTHING,
    NOTICED,
    ODD,
    SAMPLES,
    STALE,
    SURE,
)

Cost = Callable[[int], float]
"""Seconds of a forward by the nodes of the draft in it."""


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """What a draft takes, in seconds or in plain steps: a part for each level of it, and a part whatever its levels.

    Attributes:
        level: For each token deeper.
        once: For the draft: a block drafter evaluates all of its levels at once.
    """

    level: float
    once: float = 0.0

    def of(self, n_levels: float) -> float:
        """Return what a draft of so many levels takes.

        >>> DraftPrice(1.0, once=5.0).of(3)
        8.0
        """
        return self.once + n_levels * self.level

    def times(self, factor: float) -> "DraftPrice":
        """Return the price in another unit, of which there are `factor` in one of this."""
        return DraftPrice(self.level * factor, self.once * factor)


@dataclass(frozen=True, slots=True)
class SharedForward:
    """A forward that several sessions may have had rows in.

    Attributes:
        seconds: Time of the forward.
        n_rows: Rows of all sessions in it.
        n_items: How many sessions had rows in it.
    """

    seconds: float = 0.0
    n_rows: int = 0
    n_items: int = 1


class StepSeconds(dict[int, float]):
    """Seconds of a step by the nodes of its draft, found out for some numbers at once when one is first asked for."""

    def __init__(self, find_out: Callable[[range], Sequence[float]]) -> None:
        super().__init__()
        self._find_out = find_out

    def __missing__(self, n_nodes: int) -> float:
        some = range(n_nodes, n_nodes + FIRST) if n_nodes else range(1)
        self.update(zip(some, self._find_out(some), strict=True))
        return self[n_nodes]


@dataclass(slots=True)
class _Bucket:
    """What is known of forwards in contexts of about one length.

    Attributes:
        base: Expected seconds by number of rows, at pace 1: from the measurement at load, or from the nearest bucket.
            Real steps replace an entry as soon as recent single-row steps tell the pace; the entry of one row stays.
        points: Median seconds of real steps, by number of rows.
        most: The most rows that were measured, 0 without any.
        growth: Where `base` was measured in much shorter contexts: the most that attention may add to a forward of one
            row, in times of its base. Else 0.
        pace: How many times as long as `base` says real steps take now, because of the machine or the context.
    """

    base: dict[int, float]
    most: int
    growth: float = 0.0
    points: dict[int, float] = field(default_factory=dict)
    pace: float = 1.0
    _samples: dict[int, deque[float]] = field(default_factory=dict)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _n_observed: int = 0
    _from_steps: set[int] = field(default_factory=set)  # rows whose base is from real steps
    _recent: dict[int, int] = field(default_factory=dict)  # rows of recent steps -> their latest one, oldest first
    _measured: dict[int, float] = field(default_factory=dict)  # table() since the last change; empty before it is asked
    _seconds: dict[int, float] = field(default_factory=dict)  # of the numbers of rows that were asked since then

    def seconds(self, n_rows: int) -> float | None:
        """Return the seconds of `n_rows` rows, None where nothing was measured."""
        return self.sums((n_rows,)).get(n_rows)

    def sums(self, numbers: Iterable[int]) -> Mapping[int, float]:
        """Return the seconds of these numbers of rows, and of others; nothing where nothing was measured."""
        sums, recent = self._seconds, self._recent
        for n_rows in numbers if self.most else ():
            if n_rows in sums:
                continue
            if n_rows in recent:
                sums[n_rows] = self.points[n_rows]
                continue
            measured = self._measured = self._measured or self.table()
            rows = list(measured)
            least, most = rows[0], rows[-1]
            index = bisect_left(rows, n_rows)
            single = n_rows / least * measured[least]
            if index == len(rows):
                sums[n_rows] = min(single, measured[most] * n_rows / most)
            elif not index or rows[index] in recent:
                sums[n_rows] = measured[rows[index]]
            else:
                below = rows[index - 1]
                times, rest = divmod(n_rows, below)
                in_parts = times * measured[below] + rest * measured[least]
                sums[n_rows] = min(measured[rows[index]], single, in_parts)
        return sums

    def observe(self, n_rows: int, seconds: float) -> float:
        """Take the seconds of a real step and return them, cut where they are out of all proportion."""
        expected, before = self.seconds(n_rows), (self.points.get(n_rows), self.pace)
        changed = n_rows not in self._recent
        if changed:
            self._samples[n_rows] = deque(maxlen=SAMPLES)
        samples = self._samples[n_rows]
        # Cut rather than left out: if such times go on, they are the machine's new speed.
        sample = min(seconds, ODD * expected) if expected else seconds
        samples.append(sample)
        middle_s = median(samples)
        if expected is not None and len(samples) < SURE:
            middle_s = min(middle_s, expected)
        self.points[n_rows] = middle_s
        self.most = max(self.most, n_rows)
        self._n_observed += 1
        self._recent.pop(n_rows, None)
        self._recent[n_rows] = self._n_observed
        oldest, last = next(iter(self._recent.items()))
        if self._n_observed - last >= STALE:
            del self._recent[oldest]
            changed = True
        base = self.base.get(n_rows)
        if base is not None and not self._is_guess(n_rows):
            self._ratios.append(sample / base)
            self.pace = median(self._ratios)
        if n_rows > 1 and len(samples) >= SURE and 1 in self._recent and 1 in self.base:
            self.base[n_rows] = middle_s * self.base[1] / self.points[1]
            self._from_steps.add(n_rows)
        if changed or before != (middle_s, self.pace):  # the median of many samples mostly stays what it was
            self._measured, self._seconds = {}, {}
        return sample

    def table(self) -> dict[int, float]:
        """Return the seconds of every number of rows that was measured, ascending."""
        result = {}
        for n in sorted(self.base.keys() | self.points.keys()):
            base = self.base.get(n)
            result[n] = self.points[n] if base is None or n in self._recent else base * self.pace
            if base is not None and n not in self._recent and self._is_guess(n):
                growth = min(max(0.0, self.pace - 1), self.growth)
                attention_s = growth * self.base.get(1, 0.0) * (1 + ATTENDED * (n - 1))
                result[n] = max(result[n], (base + attention_s) * self.pace / (1 + growth))
        return result

    def _is_guess(self, n_rows: int) -> bool:
        """Return whether the base of so many rows was measured in much shorter contexts."""
        return self.growth > 0 and n_rows > 1 and n_rows not in self._from_steps


@dataclass(slots=True)
class Budget:
    """What finding out may lose: a share of the time that has passed.

    Attributes:
        total_s: Seconds that have passed.
        lost_s: Seconds that were lost; for a trial under way, those that it is expected to lose.
    """

    total_s: float = 0.0
    lost_s: float = 0.0

    def left_s(self, share: float, beyond_s: float = 0.0) -> float:
        """Return the seconds that may still be lost: this share of the time, and `beyond_s` seconds."""
        return share * self.total_s + beyond_s - self.lost_s


@dataclass(slots=True)
class Trials(Budget):
    """The time spent on trials of rows, which are verified to time them. All requests share one Trials.

    Attributes:
        promised_s: Seconds that drafts promised to save whose rows were not known to be exact, since the latest
            measurement of such rows.
        waits: By number of rows, after a trial that lost: for how many seconds of `total_s` the next trial of so many
            rows is put off, and until which `total_s`.
    """

    promised_s: float = 0.0
    waits: dict[int, tuple[float, float]] = field(default_factory=dict)

    def count(self, n_rows: int, expected_s: float, lost_s: float, step_s: float) -> None:
        """Count a trial of `n_rows` rows that lost `lost_s` seconds where `expected_s` were expected.

        After a trial without a gain the next trial of so many rows waits, each time twice as long; `step_s` is the time
        of a plain step.
        """
        self.lost_s = max(0.0, self.lost_s - expected_s + lost_s)
        if lost_s > -NOTICED * step_s:
            wait_s = 2 * self.waits[n_rows][0] if n_rows in self.waits else STALE * step_s
            self.waits[n_rows] = wait_s, self.total_s + wait_s
        else:
            self.waits.pop(n_rows, None)

    def may_try(self, n_rows: int) -> bool:
        """Tell whether the last trial of `n_rows` rows gained, or was long ago."""
        return n_rows not in self.waits or self.total_s >= self.waits[n_rows][1]


@dataclass(slots=True)
class Resuming:
    """What the first plain step after a draft takes beyond a plain step after a plain step.

    Nothing on most processors. Where forwards are recorded and replayed, as CUDA graphs are, a step of the same kind as
    the one before is cheaper than any other: 2.0 ms instead of 2.6 to 5.6 ms on an H100. All requests share one.

    Attributes:
        share: The extra time in plain steps, 0 where it is too little to count.
        after_draft: Whether the latest forward verified a draft.
    """

    share: float = 0.0
    after_draft: bool = False
    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def observe(self, seconds: float, plain_s: float) -> bool:
        """Take a plain step after a draft where others take `plain_s`; tell whether it is unlike them."""
        self._samples.append(min(seconds / plain_s, ODD) - 1)
        if len(self._samples) >= SURE:
            middle_s = median(self._samples)
            self.share = middle_s if middle_s > NOTICED else 0.0
        return self.share > 0


class CostCurve:
    """Seconds of a forward by number of rows and tokens of context.

    The curve may be jagged. A number of rows that no recent step had takes at most the time of the next measured number
    above it, as rows could be padded, and at most the time of smaller forwards that add up to it. Above all measured
    numbers the time grows in proportion.

    >>> curve = CostCurve()
    >>> for n_rows, seconds in [(1, 0.010), (1, 0.012), (1, 0.011), (8, 0.030)]:
    ...     curve.observe(n_rows, seconds)
    >>> curve.seconds(1), curve.seconds(5), curve.seconds(16)
    (0.011, 0.03, 0.06)

    Attributes:
        keep_s: Mean seconds that keeping a branch of a tree took lately: next to nothing where that moves what was
            computed, up to a forward where nodes are evaluated again. It is a mean because a median would not show what
            happens in one step of three.
        beside_s: Mean seconds that a step takes beside proposing and its forward, as Python does: [a plain step, one
            that verifies a draft]. On a small model they are a part of what a draft costs.
        others: Tokens that other requests gain by the same forward, where forwards are shared.
        n_texts: Texts that share the forward of the present step.
        joined: The latest forward that was noted of those that several sessions had rows in; None before.
        shared: The latest forward of the session whose curve this is, where several sessions may have had rows in it.
        latest_s: Seconds of the latest forward, of keeping a branch of it, and of what a step takes beside; cut where
            they are out of all proportion. None before the first forward, and until the next one when it was set to
            None.
        trials: The time spent on trials of more rows.
        resuming: What it costs to go back from drafts to plain steps. Whoever begins to draft pays it, so that a draft
            is made where it gains that as well; it is not paid again by the drafts that follow the first one.

    Args:
        measured: Seconds by number of rows; those of one row after a forward of one row.
        resume_share: What the first plain step after a draft takes longer, in plain steps.
    """

    def __init__(self, measured: Mapping[int, float] | None = None, resume_share: float = 0.0) -> None:
        base: dict[int, float] = {}
        for n_rows, seconds in sorted((measured or {}).items(), reverse=True):
            cheapest = min(base.values(), default=seconds)
            base[n_rows] = min(seconds, cheapest)  # where more rows took less, the time of fewer rows was disturbed
        self.keep_s = self.others = 0.0
        self.n_texts = 1
        self.beside_s = [0.0, 0.0]
        self.joined: SharedForward | None = None
        self.shared: SharedForward | None = None
        self.latest_s: float | None = None
        self.trials = Trials()
        self.resuming = Resuming(resume_share if resume_share > NOTICED else 0.0)
        self._base = base
        self._buckets = {0: _Bucket(dict(base), max(base))} if base else {}
        self._cost: tuple[_Bucket, Cost] | None = None  # the latest answer of cost(), since the last observation

    def observe(self, n_rows: int, seconds: float, n_past: int = 0, keep_s: float | None = None) -> None:
        """Take the measured seconds of one forward over `n_rows` rows after `n_past` tokens.

        `keep_s` is the seconds that Session.keep took after the forward, None for a chain, which needs no keep. More
        than the forward took is not believed, as keep evaluates at most the nodes of the forward again.
        """
        bucket, resuming, is_draft = self._bucket(n_past), self.resuming, n_rows > 1
        self._cost = None
        spent_s = seconds + (self._resume_s(bucket) if is_draft and not resuming.after_draft else 0.0)
        plain_s = bucket.seconds(1) if resuming.after_draft and not is_draft else None  # of a step after a draft
        resuming.after_draft = is_draft
        if not (plain_s and resuming.observe(seconds, plain_s)):
            spent_s += bucket.observe(n_rows, seconds) - seconds
        self.latest_s = spent_s + (keep_s or 0.0) + self.beside_s[is_draft]
        if keep_s is None:
            self.keep_s *= 1 - LOSS_SHARE  # about what it may lose to find out that trees are still dear
        else:
            self.keep_s += NEWEST * (min(keep_s, bucket.seconds(n_rows) or seconds) - self.keep_s)

    def observe_beside(self, n_rows: int, seconds: float) -> None:
        """Take the seconds that a step with `n_rows` rows took beside proposing and its forward."""
        beside_s, self._cost = self.beside_s[n_rows > 1], None
        new = min(seconds, ODD * beside_s) if beside_s else seconds
        self.beside_s[n_rows > 1] += (NEWEST if beside_s else 1.0) * (new - beside_s)

    def _bucket(self, n_past: int) -> _Bucket:
        """Return the bucket of contexts of `n_past` tokens; a new bucket begins with the points of the nearest one."""
        key = (n_past // BUCKET).bit_length()
        if (bucket := self._buckets.get(key)) is None:
            nearest = min(self._buckets, key=lambda other: abs(other - key), default=None)
            table = dict(self._base) if nearest is None else self._buckets[nearest].table()
            is_far = nearest is not None and nearest < key - 1  # a text that grows meets each bucket in turn
            growth = (BUCKET << key - 1) / AS_LONG if is_far else 0.0
            bucket = self._buckets[key] = _Bucket(table, max(table, default=0), growth)
        return bucket

    def is_new(self, n_past: int) -> bool:
        """Return whether contexts of `n_past` tokens are much longer than those timed, so a plain step is due."""
        bucket = self._bucket(n_past)
        return bucket.growth > 0 and 1 not in bucket.points

    def seconds(self, n_rows: int, n_past: int = 0) -> float | None:
        """Return the expected seconds of a forward over `n_rows` rows, or None where nothing was measured.

        For a number of rows that no recent step had, these are the seconds at load, or when it was last seen, times how
        much slower the machine has become since.
        """
        return self._bucket(n_past).seconds(n_rows)

    def growth(self, n_rows: int) -> float:
        """Return how many times as long as one row `n_rows` rows of one or of several sessions take, at least once.

        >>> CostCurve({1: 0.010, 4: 0.015}).growth(4)
        1.5
        """
        one, many = self.seconds(1), self.seconds(n_rows)
        return max(1.0, many / one) if one and many else 1.0

    def is_unknown(self, n_rows: int) -> bool:
        """Tell whether no forward of `n_rows` rows or more was ever timed."""
        return all(bucket.most < n_rows for bucket in self._buckets.values())

    def cost(self, n_past: int = 0) -> Cost:
        """Return the seconds of a step by the nodes of its draft, until the next observation: forward and `beside_s`.

        Where nothing was measured, each row counts a second.

        >>> curve = CostCurve({1: 0.010, 4: 0.015})
        >>> curve.observe_beside(4, 0.005)
        >>> curve.cost()(0), curve.cost()(3)
        (0.01, 0.02)
        """
        bucket, latest, (plain_s, draft_s) = self._bucket(n_past), self._cost, self.beside_s
        if latest is not None and latest[0] is bucket:
            return latest[1]
        if not self.resuming.after_draft:
            draft_s += self._resume_s(bucket)

        def find_out(some: range) -> list[float]:
            rows = range(some.start + 1, some.stop + 1)
            sums, beside_s = bucket.sums(rows), draft_s if some.start else plain_s
            return [(sums.get(n_rows) or float(n_rows)) + beside_s for n_rows in rows]

        cost = StepSeconds(find_out).__getitem__
        self._cost = bucket, cost
        return cost

    def _resume_s(self, bucket: _Bucket) -> float:
        """Return the seconds that the next plain step takes longer when a draft comes before it."""
        return self.resuming.share * (bucket.seconds(1) or 0.0)

    def up_to(self, n_rows: int, n_past: int = 0) -> list[float]:
        """Return the seconds of steps of 1 to `n_rows` rows, a second for each row where nothing was measured."""
        cost = self.cost(n_past)
        return [cost(n) for n in range(n_rows)]

    def table(self) -> dict[int, float]:
        """Return the seconds of the measured row counts, ascending, in the shortest contexts seen."""
        return self._buckets[min(self._buckets)].table() if self._buckets else {}


def best_length(
    rate: float, price: DraftPrice, cost: Cost, n_max: int, plain_rate: float, others: float = 0.0
) -> tuple[int, float]:
    """Return the best length of a chain, 1 to `n_max`, and how many times as fast as `plain_rate` it makes the text.

    Each node is accepted with P = `rate`; `price` is the seconds of drafting, `cost(n)` those of a forward with n
    nodes, `plain_rate` the tokens per second without the chain, those of other requests included that share the forward
    and gain `others` tokens by it.

    >>> best_length(0.8, DraftPrice(0.01), lambda n: 0.05, 8, 1 / 0.05)[0]
    4
    """
    best, gain, plain_rate = 1, 0.0, max(plain_rate, 1e-9)
    expected, path, level, once = 1.0 + others, 1.0, price.level, price.once
    for n in range(1, n_max + 1):
        path *= rate
        expected += path
        length_rate = expected / (once + n * level + cost(n)) / plain_rate
        if length_rate > gain:
            best, gain = n, length_rate
        if path * rate < NEXT_TO_NOTHING * (1 - rate):  # what all further nodes together would add
            break
    return best, gain
