"""Simulates the scheduler with recorded drafts, fixed costs, and a clock that stands still unless told.

    python benchmarks/studies/policy.py --out grid.json

policy_recorder.py made the recordings: what each drafter proposes at every position of the text that plain decoding
gives. So any policy can be replayed, with the scheduler's own classes. A row of the grid is a machine, a model, its
drafters, greedy or drawn texts, and how many are written together. Its gain is the time of plain decoding over that of
the policy, summed over the texts, each of which finds what earlier ones have shown; one text at a time is written in
five orders. Its worst is the lowest such ratio over the first n tokens of any text, for any n from 16 to 64. A change
of the scheduler is judged by the whole grid: decisions feed back, so a single row moves by some per cent.
"""

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve, DraftPrice, SharedForward
from edgedec.draft import Draft, Verification
from edgedec.drafter import Calibration, DrafterNeeds, Floor
from edgedec.drafter_traits import DraftCost, DrafterTraits
from edgedec.drafters.draft_builder import DraftBuilder, Level, path_of
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.policy import Policy
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.stats import DecodeStats

RESULTS = Path(__file__).resolve().parents[1] / "results"
N_MAX = 15
DRAFTERS = {"lookup": ("suffix", "common"), "head": ("head",), "both": ("suffix", "common", "head")}
STEP_S, LOOK_S, REST_S = 170e-6, 190e-6, 10e-6  # Python of a plain step; of the policy where it asks, where it rests
KEEP_S = CALL_S = 20e-6  # to keep a branch of a tree; to call a head, beside the call itself
CLOCKS = ("policy.perf_counter", "active_drafters.perf_counter", "active_drafters.monotonic")


class Clock:
    """Seconds that pass only when somebody says so."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time, as perf_counter and monotonic do."""
        return self.now


@dataclass(slots=True)
class Machine:
    """What forwards and drafters take.

    Attributes:
        table: Seconds of a forward by tokens of context, by rows.
        asked: Seconds of a look-up, by drafter; of teaching it.
        taught: Seconds of teaching a drafter, by its name.
        head: Seconds of a head's draft by its levels, for one text.
        read_s: Seconds that a head takes to read a token along.
        n_along: How many texts called the head in the last step.
    """

    table: dict[int, dict[int, float]]
    asked: Mapping[str, float]
    taught: Mapping[str, float]
    head: DraftPrice
    read_s: float
    n_along: int = 1

    def forward(self, n_rows: int, n_past: float) -> float:
        """Return the seconds of a forward."""
        at = []
        for row in self.table.values():
            rows = list(row)
            at.append(np.interp(n_rows, rows, list(row.values())) * max(1.0, n_rows / rows[-1]))
        return float(np.interp(n_past, list(self.table), at))


class Replayed:
    """A drafter that proposes what was recorded; implements edgedec.drafter.Drafter."""

    needs = DrafterNeeds()

    def __init__(self, name: str, drafts: Sequence[Any], machine: Machine, clock: Clock, looks: list[int]) -> None:
        self.name, self.drafts, self.machine, self.clock, self.looks = name, drafts, machine, clock, looks
        self.position, self.joint_s = 0, 0.0
        self.floor, self.correction = Floor(), Calibration()
        self.is_head = name == "head"

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take nothing: what was recorded knows the prompt."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return what was recorded; of a head's chain what it drafts until the floor says that it does not pay."""
        self.clock.now += 0.0 if self.looks else LOOK_S
        self.looks.append(1)
        tokens, parents, p = self.drafts[self.position - 1] if self.position <= len(self.drafts) else ((), (), ())
        draft = Draft.tree(tokens, parents, p).truncated(n_max)
        if not self.is_head:
            self.clock.now += self.machine.asked[self.name]
            return draft
        found = DraftBuilder(n_max)
        n_levels = found.add_levels(
            levels_of(draft),
            deadline_s=inf,
            least_path=self.floor.path_probability,
            least_leaf=0.05,
            corrected=self.correction.corrected,
        )
        n, machine = max(1, self.machine.n_along), self.machine
        growth = machine.forward(n, 64) / machine.forward(1, 64)
        self.joint_s = machine.head.of(max(1, n_levels)) * growth
        self.clock.now += self.joint_s + CALL_S
        return found.build()

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Go on in the text."""
        self.clock.now += self.machine.taught[self.name]
        self.position += len(verification.token_ids)

    def memory_bytes(self) -> int:
        """Nothing."""
        return 0


def levels_of(draft: Draft) -> Iterator[Level]:
    """Yield the levels of a recorded chain with leaves; the first of each level goes on."""
    above = -1
    while children := [node for node, parent in enumerate(draft.parents) if parent == above]:
        yield Level([draft.tokens[node] for node in children], [draft.p_accept[node] for node in children])
        above = children[0]


@dataclass(slots=True)
class Text:
    """A text that is written."""

    tokens: Sequence[int]
    n_prompt: int
    drafters: list[Replayed]
    curve: CostCurve
    policy: Policy | None
    n: int = 1
    times: list[float] = field(default_factory=lambda: [0.0])


@dataclass(slots=True)
class Case:
    """A row of the grid."""

    machine: Machine
    recorded: Sequence[dict[str, Any]]
    names: Sequence[str]
    greedy: bool
    n_together: int
    at_load: dict[int, float]


def write(case: Case, make: Callable[..., Any] | None) -> list[list[float]]:
    """Write all texts, and return when each of their tokens came, in seconds since its text began."""
    clock, machine = Clock(), case.machine
    common, lock, records, times = CostCurve(case.at_load), Lock(), dict[str, DrafterRecord](), list[list[float]]()
    with ExitStack() as patched:
        for name in CLOCKS:
            patched.enter_context(patch(f"edgedec.scheduler.{name}", clock))
        for i in range(0, len(case.recorded), case.n_together):
            looks = list[int]()
            some = case.recorded[i : i + case.n_together]
            texts = [opened(case, each, common, lock, records, clock, looks, make) for each in some]
            begun, machine.n_along = clock.now, case.n_together
            while live := [text for text in texts if text.n < len(text.tokens)]:
                step(live, machine, clock, looks, begun)
            for text in texts:
                if text.policy is not None:
                    text.policy.close()
            times += [text.times for text in texts]
    return times


def opened(  # what one text shares with the others is named one by one
    case: Case,
    recorded: dict[str, Any],
    common: CostCurve,
    lock: Any,
    records: dict[str, DrafterRecord],
    clock: Clock,
    looks: list[int],
    make: Callable[..., Any] | None,
) -> Text:
    """Return a text with its drafters, as drafter_set opens them."""
    curve = common if case.n_together == 1 else JoinedCurve(common, lock)
    if case.n_together > 1:
        curve.shared = SharedForward(1.0, case.n_together, case.n_together)
    drafters = [Replayed(name, recorded["drafts"][name], case.machine, clock, looks) for name in case.names]
    floor, active = Floor(), []
    for each in drafters if make is not None else ():
        record = records.setdefault(each.name, DrafterRecord())
        traits = DrafterTraits()
        if each.is_head:
            price = case.machine.head
            traits = DrafterTraits(DraftCost.CALLS, rate=0.5, level_s=price.level, once_s=price.once)
        record.expect(traits)
        each.floor, each.correction = floor, record.calibration[case.greedy]
        one = ActiveDrafter(each.name, each, record, traits.cost, case.greedy)
        active.append(one)
    policy = None if make is None else make(active, 50_000, curve, PolicyOptions(N_MAX), floor, None)
    text = Text(recorded["tokens"], recorded["n_prompt"], drafters, curve, policy)
    if policy is not None:
        policy.learn(DecodeStats(), Draft.chain([]), Verification((), (text.tokens[0],)), {})
    return text


def step(live: Sequence[Text], machine: Machine, clock: Clock, looks: list[int], begun: float) -> None:
    """Make a step of all texts: drafts, one forward, and what comes of it."""
    drafts, joint_s, stats = list[Draft](), [0.0], DecodeStats()
    for text in live:
        looks.clear()
        for each in text.drafters:
            each.joint_s = 0.0
        draft, policy = Draft.chain([]), text.policy
        if policy is not None and policy.rests:
            policy.rest()
            clock.now += REST_S
        elif policy is not None:
            draft = policy.propose(stats, text.n_prompt + text.n - 1, min(N_MAX, len(text.tokens) - text.n - 1))
            clock.now += 0.0 if looks else (REST_S if policy.skips else LOOK_S / 5)
        drafts.append(draft)
        called_s = sum(each.joint_s for each in text.drafters)
        clock.now -= called_s  # all texts call the head together, so that it is waited for once
        joint_s.append(called_s)
    machine.n_along = sum(seconds > 0 for seconds in joint_s)
    clock.now += max(joint_s)
    rows = len(live) + sum(map(len, drafts))
    seconds = machine.forward(rows, float(np.mean([text.n_prompt + text.n for text in live])))
    if live[0].policy is not None and any(each.is_head for each in live[0].drafters):
        seconds += machine.read_s * rows
    clock.now += seconds
    for text, draft in zip(live, drafts, strict=True):
        n_past, policy = text.n_prompt + text.n - 1, text.policy
        path = path_of(draft.tokens, draft.parents, text.tokens[text.n : -1] if len(draft) else ())
        came = tuple(text.tokens[text.n : text.n + len(path) + 1])
        clock.now += STEP_S
        if policy is not None:
            text.curve.shared = SharedForward(seconds, rows, len(live))
            skips = policy.skips and not len(draft)
            if not skips:
                text.curve.observe(1 + len(draft), seconds, n_past, None if draft.is_chain else KEEP_S)
            started = clock.now
            policy.learn(stats, draft, Verification(tuple(path), came), {})
            if not skips:
                text.curve.observe_beside(1 + len(draft), STEP_S + clock.now - started)
        text.n += len(came)
    for text in live:
        text.times += [clock.now - begun] * (text.n - len(text.times))


def judged(case: Case, make: Callable[..., Any] | None) -> tuple[float, float]:
    """Return the gain and the worst of a row; where one text is written at a time, of five orders of the texts."""
    plain, times, turned = list[list[float]](), list[list[float]](), case.recorded
    for _ in range(5 if case.n_together == 1 else 1):
        plain += write(replace(case, recorded=turned), None)
        times += write(replace(case, recorded=turned), make)
        turned = [*turned[3:], *turned[:3]]
    gain = sum(text[-1] for text in plain) / sum(text[-1] for text in times)
    worst = min(p / t for ps, ts in zip(plain, times, strict=True) for p, t in list(zip(ps, ts, strict=True))[15:64])
    return gain, worst


def machines(document: dict[str, Any]) -> dict[str, Machine]:
    """Return this machine as it was measured with the recordings, and a Zen 5 with its curve of another day."""
    costs = document["costs"]
    short, long = ({int(n): s for n, s in costs["forward"][past].items()} for past in ("64", "1024"))
    grows = max(1.0, min(long[1], long[2]) / min(short[1], short[2]))
    here = {64: monotone(short), 1024: {n: s + (grows - 1) * short[1] for n, s in monotone(short).items()}}
    depths = {int(n): s for n, s in costs["head"]["by_depth"].items()}
    level, once = np.polyfit([1, 4], [depths[1], depths[4]], 1)
    price = DraftPrice(float(level), max(0.0, float(once)))
    asked = {name: float(np.median(list(costs[name]["by_depth"].values()))) for name in ("suffix", "common")}
    taught = {name: costs[name]["learn"] for name in ("suffix", "common", "head")}
    runs = json.loads((RESULTS / "bench_heads-zen5.json").read_text(encoding="utf-8"))["runs"]
    curve = next(run["curve"] for name, run in runs.items() if name.startswith(document["model"]))
    other = monotone({int(n): ms / 1000 for n, ms in curve.items()})
    ratio = other[1] / here[64][1]
    zen5 = {64: other, 1024: {n: s + (grows - 1) * other[1] for n, s in other.items()}}
    return {
        "avx2": Machine(here, asked, taught, price, costs["head"]["read"]),
        "zen5": Machine(zen5, asked, taught, price.times(ratio), costs["head"]["read"] * ratio),
    }


def monotone(row: dict[int, float]) -> dict[int, float]:
    """Return seconds by rows, where more rows never take less: they were disturbed then."""
    return {n: min(seconds for more, seconds in row.items() if more >= n) for n in sorted(row)}


def cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """Yield the rows of the grid."""
    for path in sorted(folder.glob("policy-*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        drawn = {t: [one for one in document["texts"] if one["temperature"] == t] for t in (0.0, 0.7)}
        kinds = machines(document)
        for kind, drafters, temperature, n in product(kinds, DRAFTERS, drawn, (1, 8)):
            machine, texts = kinds[kind], [one for one in drawn[temperature] if len(one["tokens"]) > 16]
            load = {rows: machine.table[64][rows] for rows in (1, 2, 4, 8, 16, 32, 64)}
            name = f"{kind} {document['model']} {drafters} {temperature} {n}"
            yield name, Case(machine, texts, DRAFTERS[drafters], temperature == 0, n, load)


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for name, case in cases(args.recordings):
        found[name] = judged(case, Policy)
        print(f"{name:45} {found[name][0]:.3f} {found[name][1]:.3f}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
