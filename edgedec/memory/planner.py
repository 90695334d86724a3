"""What to load under a memory cap: the first plan that fits, from the wishes down the ladder (memory/ladder.py)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.model_info import trained_context
from edgedec.gguf.model_kinds import embeds_only
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.setting import (
    Cap,
    Plan,
    ample_bytes,
    devices_for,
    file_bytes,
    free_if_short,
    longest_context,
    planning_bytes,
)
from edgedec.memory.system import available_bytes, peak_resident_bytes, resident_bytes, return_free_memory
from edgedec.memory_plan import DeviceCap, MemoryPlan, MemoryTerm, n_split

if TYPE_CHECKING:  # the ladder is imported where a plan goes down it
    from edgedec.memory.ladder import Rung

_MOST_SLOWDOWN = 1.1  # of a step's time: for less, weights are read as needed before the context is cut
_CLOSE_BYTES = 100_000  # how exactly the least weights that a runtime can stream with are found


def plan_within(wishes: LoadPlan, cap: Cap) -> LoadPlan:
    """Return the first plan down the ladder that fits under the cap; the smallest if none fits.

    Without a cap, the system's free memory is the cap where the model may not fit into it. Devices have caps as well
    where the model may not fit into the first one, or where `cap` has one for them. Elsewhere the wishes are returned
    as they are, without terms.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    cap = _within_free(wishes.path, cap)
    wishes = wishes.with_options(planning_bytes=planning_bytes(cap))
    if cap.n_bytes is None and cap.gpu_bytes is None:
        devices = devices_for(wishes)
        if not devices or (len(devices) == 1 and devices[0].free_bytes >= ample_bytes(wishes.path)):
            return _definite(wishes, cap)
    return plans_within(wishes, cap)[0]


def plans_within(wishes: LoadPlan, cap: Cap) -> tuple[LoadPlan, list[LoadPlan]]:
    """Return the plan of plan_within, with its terms in any case; and all plans down the ladder, that one among them.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    cap = _within_free(wishes.path, cap)
    plans = all_plans(wishes, cap)
    best = best_of(plans)
    chosen = with_peak(best, cap)
    return chosen, [chosen if each is best else each for each in plans]


def _within_free(path: Path, cap: Cap) -> Cap:
    """Return the cap; without one, that of the system's free memory where the model may not fit into it."""
    if cap.n_bytes is not None or (free := free_if_short(path)) is None:
        return cap
    return_free_memory()
    held = resident_bytes() or 0  # other models included
    return replace(cap, n_bytes=held + free, beside_bytes=held, whole_process=True, name="free")


def with_peak(plan: LoadPlan, cap: Cap) -> LoadPlan:
    """Return the plan with a term for its making, if the process held more than the cap while it was made.

    A large header is parsed and checked for the plan, before anything is loaded.
    """
    memory, peak = plan.memory, peak_resident_bytes() or 0
    is_checked = cap.n_bytes is not None and cap.whole_process and cap.name == "allowed"
    if not is_checked or peak <= max(cap.n_bytes or 0, memory.total_bytes, cap.earlier_peak_bytes):
        return plan
    detail = "held for a while to make this plan, before anything is loaded"
    term = MemoryTerm("planning", peak - memory.total_bytes, detail)
    return replace(plan, memory=replace(memory, terms=(*memory.terms, term)))


def best_of(plans: Sequence[LoadPlan]) -> LoadPlan:
    """Return the first plan that fits, or else the smallest."""
    smallest = min(plans, key=_size)
    return next((plan for plan in plans if plan.memory.fits), smallest)


def all_plans(wishes: LoadPlan, cap: Cap) -> list[LoadPlan]:
    """Return plans with their terms, from the wishes downwards; each gives up something more than the one before.

    The first that fits gets back what was given up before it in vain. Under a cap the last plans keep only a part of
    the weights in memory, as much as the cap allows, where the runtime can do that.

    Where a comparison chose a runtime for its speed, and its model doesn't fit, the plans are those of the slower
    runtime, whose text may differ.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    plans = _descend(wishes, cap)
    if wishes.slower is None or best_of(plans).memory.fits:
        return plans
    first, second = wishes.runtime.name, wishes.slower.name
    if cap.whole_process:  # the first runtime left something behind, such as its library
        return_free_memory()
        cap = replace(cap, beside_bytes=max(cap.beside_bytes, resident_bytes() or 0))
    given_up = {"runtime": f"runtime {second} in place of {first}"}
    reason = f"{wishes.reason}; only {second} fits"
    instead = replace(wishes, runtime=wishes.slower, slower=None, reason=reason, given_up=given_up)
    return min(plans, _descend(instead, cap), key=lambda fitting: _size(best_of(fitting)))


def plan_wishes(wishes: LoadPlan, cap: Cap) -> LoadPlan:
    """Return the wishes with their terms, whether they fit or not (raises what Runtime.plan raises)."""
    from edgedec.memory.terms import planner_of

    return planner_of(wishes, cap)(_definite(wishes, cap))


def with_kv_type(options: LoadOptions) -> LoadOptions:
    """Return the options with the type of the KV cache that is wished for where it is "auto": f16."""
    return replace(options, kv_type="f16") if options.kv_type == "auto" else options


def _size(plan: LoadPlan) -> tuple[int, int]:
    return plan.memory.over_bytes, plan.memory.total_bytes


def _definite(wishes: LoadPlan, cap: Cap) -> LoadPlan:
    """Return the wishes with the context and the type of the KV cache filled in.

    An embedding model's context is at most as long as what the model was trained for: many have no later positions.
    """
    options, n_trained, n_ctx = with_kv_type(wishes.options), trained_context(wishes.path), wishes.options.n_ctx
    if n_ctx is None:
        n_copies = options.n_parallel + wishes.n_texts - 1
        n_ctx = longest_context(wishes.path, 0 if wishes.slides else _room_bytes(wishes, cap), n_copies)
    if n_trained and embeds_only(wishes.path):
        n_ctx = min(n_ctx, n_trained)
    return replace(wishes, options=replace(options, n_ctx=n_ctx))


def _room_bytes(wishes: LoadPlan, cap: Cap) -> float:
    """Return the bytes that the model leaves free, of what it may take of the host and of each device.

    Without a cap they are certainly free, as nothing may be planned there; under a cap the ladder looks closer.
    """
    host = (available_bytes() or 0) if cap.n_bytes is None else cap.n_bytes - cap.beside_bytes
    caps = tuple[DeviceCap, ...]()
    if devices := devices_for(wishes):
        from edgedec.memory.terms import device_caps

        caps = device_caps(devices, cap.gpu_bytes, cap.gpu_beside_bytes)
    n_model = ample_bytes(wishes.path) if cap.n_bytes is None else file_bytes(wishes.path)
    return min([host, *(its.cap_bytes for its in caps)]) - n_model


def _descend(wishes: LoadPlan, cap: Cap) -> list[LoadPlan]:
    """Return the plans of one runtime; each gives up something more than the one before it."""
    from edgedec.memory.ladder import rungs
    from edgedec.memory.terms import planner_of

    plan, first = planner_of(wishes, cap), _definite(wishes, cap)
    if cap.n_bytes is not None and not (first.drafters or first.max_rows_pinned):
        first = first.with_options(max_rows=1)
    plans, taken, current = [plan(first)], list["Rung"](), first
    with_devices = bool(plans[0].memory.devices)
    for rung in rungs(wishes, with_devices=with_devices, embeds=embeds_only(wishes.path)):
        lower = rung(current)
        if lower == current:
            continue
        try:
            planned = plan(lower)
        except RequestError:  # a KV type that this model's heads don't take
            continue
        if planned.memory.terms == plans[-1].memory.terms:  # the step brings nothing
            continue
        taken.append(rung)
        current = lower
        if planned.memory.fits and not plans[-1].memory.fits:
            planned = _with_back(plan, taken, first, planned)
        plans.append(planned)
    if cap.n_bytes is not None and not plans[-1].memory.fits:
        plans += _streamed_plans(plan, plans, cap.n_bytes)
    return plans if cap.n_bytes is None else _with_longest_context(plan, plans, cap.n_bytes)


def _with_longest_context(plan: Plan, plans: list[LoadPlan], cap_bytes: int) -> list[LoadPlan]:
    """Return the plans, with a longer context before the one that is chosen where that costs hardly any speed.

    Weights are read as needed in its place. The longest context is taken whose step takes less than a tenth longer than
    that of the plan that is chosen, by the measured rates of disk and memory.
    """
    from edgedec.memory.ladder import CONTEXTS, with_context

    chosen = best_of(plans)
    if not chosen.memory.fits or "context" not in chosen.given_up:
        return plans
    least, most = (each.options.n_ctx or 0 for each in (chosen, plans[0]))
    whole = replace(chosen.with_options(n_ctx=most), given_up=chosen.given_up_without("context"))
    for n_ctx in sorted({most, *CONTEXTS}, reverse=True):
        longer = _streamed(plan, with_context(n_ctx, whole), cap_bytes) if least < n_ctx <= most else []
        if (
            longer
            and longer[0].memory.fits
            and longer[0].memory.slowdown <= _MOST_SLOWDOWN * chosen.memory.slowdown < math.inf
        ):
            place = plans.index(chosen)
            return [*plans[:place], *longer, *plans[place:]]
    return plans


def _with_back(plan: Plan, taken: "Sequence[Rung]", first: LoadPlan, fitting: LoadPlan) -> LoadPlan:
    """Return the plan without those of the steps taken that it fits without, the dearest first.

    None comes back at the price of layers on devices.
    """
    n_layers = n_split(fitting.options.layer_split or ())
    for rung in taken[-2::-1]:
        fewer = [other for other in taken if other is not rung]
        planned = first
        for step in fewer:
            planned = step(planned)
        planned = plan(planned)
        if planned.memory.fits and n_split(planned.options.layer_split or ()) >= n_layers:
            taken, fitting = fewer, planned
    return fitting


def _streamed_plans(plan: Plan, plans: Sequence[LoadPlan], cap_bytes: int) -> list[LoadPlan]:
    """Return the plans that read a part of the weights in each forward, up to one that fits; none if none can.

    The longer a draft, the fewer forwards a text takes, so long drafts are tried first.
    """
    from edgedec.memory.ladder import with_more_rows

    last = plans[-1]
    drafting = next((each for each in reversed(plans) if each.drafters), last)
    streamed: list[LoadPlan] = []
    for each in (with_more_rows(drafting, plans[0]), drafting, last):
        streamed += _streamed(plan, each, cap_bytes)
        if streamed and streamed[-1].memory.fits:
            return streamed
    return streamed + _least_streamed(plan, last)


def _streamed(plan: Plan, whole: LoadPlan, cap_bytes: int) -> list[LoadPlan]:
    """Return the plan that keeps as much of the weights in memory as the cap allows, if the runtime can do that."""
    memory = plan(whole).memory
    n_resident, over = _weight_bytes(memory), memory.total_bytes - cap_bytes
    streamed: list[LoadPlan] = []
    for _ in range(3):  # more than once, as reading ahead takes memory of its own
        n_resident -= over
        if over <= 0 or n_resident < 0:
            break
        try:
            streamed = [plan(_with_streamed_weights(whole, n_resident))]
        except EdgedecError:  # the runtime can't, or not with so little
            break
        over = streamed[0].memory.total_bytes - cap_bytes
    return streamed


def _least_streamed(plan: Plan, whole: LoadPlan) -> list[LoadPlan]:
    """Return the plan that keeps the fewest bytes of the weights that the runtime can stream with, if it can."""
    least, most = 0, _weight_bytes(plan(whole).memory)
    streamed: list[LoadPlan] = []
    while most - least > _CLOSE_BYTES:
        middle = (least + most) // 2
        try:
            streamed, most = [plan(_with_streamed_weights(whole, middle))], middle
        except EdgedecError:
            least = middle
    return streamed


def _with_streamed_weights(plan: LoadPlan, n_bytes: int) -> LoadPlan:
    """Return the plan that keeps so many bytes of the weights in memory and reads the others in each forward."""
    return plan.less("weights", "weights read from storage as needed").with_options(resident_bytes=n_bytes)


def _weight_bytes(memory: MemoryPlan) -> int:
    return sum(term.n_bytes for term in memory.terms if term.name.startswith("weights"))
