"""What to load under a memory cap: the first setting that fits, from the wishes down the ladder (memory/ladder.py)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.model_info import trained_context
from edgedec.gguf.model_kinds import embeds_only
from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.setting import (
    DRAFT_MODEL,
    Cap,
    Plan,
    Planned,
    Setting,
    ample_bytes,
    devices_for,
    file_bytes,
    free_if_short,
    longest_context,
    planning_bytes,
)
from edgedec.memory.system import available_bytes, peak_resident_bytes, resident_bytes, return_free_memory
from edgedec.memory_plan import (
    DeviceCap,
    MemoryPlan,
    MemoryTerm,
    n_split,
)
from edgedec.scheduler.drafter_factories import CASCADE, MODEL

if TYPE_CHECKING:  # the ladder is imported where a plan goes down it
    from edgedec.memory.ladder import Rung

_MOST_SLOWDOWN = 1.1  # of a step's time: for less, weights are read as needed before the context is cut
_CLOSE_BYTES = 100_000  # how exactly the least weights that a runtime can stream with are found


def plan_within(choice: Choice, wishes: Setting, cap: Cap) -> Planned:
    """Return the first setting down the ladder that fits under the cap, with its plan; the smallest if none fits.

    Without a cap, the system's free memory is the cap where the model may not fit into it. Devices have caps as well
    where the model may not fit into the first one, or where `cap` has one for them. Elsewhere the wishes are returned
    as they are, with a plan that has no terms.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    if cap.n_bytes is None:
        free = free_if_short(choice.path)
        room = planning_bytes(Cap(free))
        devices = devices_for(choice, replace(wishes, options=replace(wishes.options, planning_bytes=room)))
        is_first_ample = not devices or (len(devices) == 1 and devices[0].free_bytes >= ample_bytes(choice.path))
        if free is None and cap.gpu_bytes is None and is_first_ample:
            return Planned(_definite(wishes, choice, cap), MemoryPlan(()), choice)
        if free is not None:
            return_free_memory()
            held = resident_bytes() or 0  # other models included
            cap = replace(cap, n_bytes=held + free, beside_bytes=held, whole_process=True, name="free")
    wishes = replace(wishes, options=replace(wishes.options, planning_bytes=planning_bytes(cap)))
    return with_peak(best_of(plan_settings(choice, wishes, cap)), cap)


def with_peak(planned: Planned, cap: Cap) -> Planned:
    """Return the plan with a term for its making, if the process held more than the cap while it was made.

    A large header is parsed and checked for the plan, before anything is loaded.
    """
    plan, peak = planned.plan, peak_resident_bytes() or 0
    is_checked = cap.n_bytes is not None and cap.whole_process and cap.name == "allowed"
    if not is_checked or peak <= max(cap.n_bytes or 0, plan.total_bytes, cap.earlier_peak_bytes):
        return planned
    detail = "held for a while to make this plan, before anything is loaded"
    term = MemoryTerm("planning", peak - plan.total_bytes, detail)
    return replace(planned, plan=replace(plan, terms=(*plan.terms, term)))


def best_of(settings: Sequence[Planned]) -> Planned:
    """Return the first setting that fits, or else the smallest."""
    smallest = min(settings, key=_size)
    return next((planned for planned in settings if planned.plan.fits), smallest)


def plan_settings(choice: Choice, wishes: Setting, cap: Cap) -> list[Planned]:
    """Return settings with their plans, from the wishes downwards; each gives up something more than the one before.

    The first that fits gets back what was given up before it in vain. Under a cap the last settings keep only a part of
    the weights in memory, as much as the cap allows, where the runtime can do that.

    Where a comparison chose a runtime for its speed, and its model doesn't fit, the settings are those of the slower
    runtime, whose text may differ.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    settings = _descend(choice, wishes, cap)
    if choice.slower is None or best_of(settings).plan.fits:
        return settings
    first, second = choice.runtime.name, choice.slower.name
    instead = replace(choice, runtime=choice.slower, slower=None, reason=f"{choice.reason}; only {second} fits")
    if cap.whole_process:  # the first runtime left something behind, such as its library
        return_free_memory()
        cap = replace(cap, beside_bytes=max(cap.beside_bytes, resident_bytes() or 0))
    wishes = replace(wishes, given_up={"runtime": f"runtime {second} in place of {first}"})
    return min(settings, _descend(instead, wishes, cap), key=lambda found: _size(best_of(found)))


def plan_wishes(choice: Choice, wishes: Setting, cap: Cap) -> Planned:
    """Return the wishes with their plan, whether they fit or not (raises what Runtime.plan raises)."""
    from edgedec.memory.terms import planner_of

    return planner_of(choice, wishes, cap)(_definite(wishes, choice, cap))


def without_draft_model(planned: Planned) -> Planned:
    """Return the plan without the draft model, which is not loaded after all, as it can't pay."""
    setting, plan = planned.setting, planned.plan
    setting = replace(setting, draft_model=None, drafters=setting.drafters_without(MODEL, CASCADE))
    terms = tuple(term for term in plan.terms if not term.name.startswith(f"{DRAFT_MODEL}: "))
    return replace(planned, setting=setting, plan=replace(plan, terms=terms))


def with_kv_type(options: LoadOptions) -> LoadOptions:
    """Return the options with the type of the KV cache that is wished for where it is "auto": f16."""
    return replace(options, kv_type="f16") if options.kv_type == "auto" else options


def _size(planned: Planned) -> tuple[int, int]:
    return planned.plan.over_bytes, planned.plan.total_bytes


def _definite(wishes: Setting, choice: Choice, cap: Cap) -> Setting:
    """Return the wishes with the context and the type of the KV cache filled in.

    An embedding model's context is at most as long as what the model was trained for: many have no later positions.
    """
    options, n_trained, n_ctx = with_kv_type(wishes.options), trained_context(choice.path), wishes.options.n_ctx
    if n_ctx is None:
        n_copies = options.n_parallel + wishes.n_texts - 1
        n_ctx = longest_context(choice.path, 0 if wishes.slides else _room_bytes(choice, wishes, cap), n_copies)
    if n_trained and embeds_only(choice.path):
        n_ctx = min(n_ctx, n_trained)
    return replace(wishes, options=replace(options, n_ctx=n_ctx))


def _room_bytes(choice: Choice, wishes: Setting, cap: Cap) -> float:
    """Return the bytes that the model leaves free, of what it may take of the host and of each device.

    Without a cap they are certainly free, as nothing may be planned there; under a cap the ladder looks closer.
    """
    host = (available_bytes() or 0) if cap.n_bytes is None else cap.n_bytes - cap.beside_bytes
    caps = tuple[DeviceCap, ...]()
    if devices := devices_for(choice, wishes):
        from edgedec.memory.terms import device_caps

        caps = device_caps(devices, cap.gpu_bytes, cap.gpu_beside_bytes)
    n_model = ample_bytes(choice.path) if cap.n_bytes is None else file_bytes(choice.path)
    return min([host, *(its.cap_bytes for its in caps)]) - n_model


def _descend(choice: Choice, wishes: Setting, cap: Cap) -> list[Planned]:
    """Return the plans of the settings down the ladder, for one runtime."""
    from edgedec.memory.ladder import rungs
    from edgedec.memory.terms import planner_of

    plan, first = planner_of(choice, wishes, cap), _definite(wishes, choice, cap)
    if cap.n_bytes is not None and not (first.drafters or first.max_rows_pinned):
        first = replace(first, options=replace(first.options, max_rows=1))
    settings, taken, current = [plan(first)], list["Rung"](), first
    with_devices = bool(settings[0].plan.devices)
    for rung in rungs(wishes, choice.runtime, with_devices=with_devices, embeds=embeds_only(choice.path)):
        lower = rung(current)
        if lower == current:
            continue
        try:
            planned = plan(lower)
        except RequestError:  # a KV type that this model's heads don't take
            continue
        if planned.plan.terms == settings[-1].plan.terms:  # the step brings nothing
            continue
        taken.append(rung)
        current = lower
        if planned.plan.fits and not settings[-1].plan.fits:
            planned = _with_back(plan, taken, first, planned)
        settings.append(planned)
    if cap.n_bytes is not None and not settings[-1].plan.fits:
        settings += _streamed_settings(plan, settings, cap.n_bytes)
    return settings if cap.n_bytes is None else _with_longest_context(plan, settings, cap.n_bytes)


def _with_longest_context(plan: Plan, settings: list[Planned], cap_bytes: int) -> list[Planned]:
    """Return the settings, with a longer context before the one that is chosen where that costs hardly any speed.

    Weights are read as needed in its place. The longest context is taken whose step takes less than a tenth longer than
    that of the setting that is chosen, by the measured rates of disk and memory.
    """
    from edgedec.memory.ladder import CONTEXTS, with_context

    chosen = best_of(settings)
    if not chosen.plan.fits or "context" not in chosen.setting.given_up:
        return settings
    least, most = (each.setting.options.n_ctx or 0 for each in (chosen, settings[0]))
    options = replace(chosen.setting.options, n_ctx=most)
    whole = replace(chosen.setting, options=options, given_up=chosen.setting.given_up_without("context"))
    for n_ctx in sorted({most, *CONTEXTS}, reverse=True):
        longer = _streamed(plan, with_context(n_ctx, whole), cap_bytes) if least < n_ctx <= most else []
        if (
            longer
            and longer[0].plan.fits
            and longer[0].plan.slowdown <= _MOST_SLOWDOWN * chosen.plan.slowdown < math.inf
        ):
            place = settings.index(chosen)
            return [*settings[:place], *longer, *settings[place:]]
    return settings


def _with_back(plan: Plan, taken: "Sequence[Rung]", first: Setting, found: Planned) -> Planned:
    """Return the setting without those of the steps taken that it fits without, the dearest first.

    None comes back at the price of layers on devices.
    """
    n_layers = n_split(found.setting.options.layer_split or ())
    for rung in taken[-2::-1]:
        fewer = [other for other in taken if other is not rung]
        setting = first
        for step in fewer:
            setting = step(setting)
        planned = plan(setting)
        if planned.plan.fits and n_split(planned.setting.options.layer_split or ()) >= n_layers:
            taken, found = fewer, planned
    return found


def _streamed_settings(plan: Plan, settings: Sequence[Planned], cap_bytes: int) -> list[Planned]:
    """Return the settings that read a part of the weights in each forward, up to one that fits; none if none can.

    The longer a draft, the fewer forwards a text takes, so long drafts are tried first.
    """
    from edgedec.memory.ladder import with_more_rows

    wishes, last = settings[0].setting, settings[-1].setting
    drafting = next((planned.setting for planned in reversed(settings) if planned.setting.drafters), last)
    found: list[Planned] = []
    for setting in (with_more_rows(drafting, wishes), drafting, last):
        found += _streamed(plan, setting, cap_bytes)
        if found and found[-1].plan.fits:
            return found
    return found + _least_streamed(plan, last)


def _streamed(plan: Plan, setting: Setting, cap_bytes: int) -> list[Planned]:
    """Return the setting that keeps as much of the weights in memory as the cap allows, if the runtime can do that."""
    whole = plan(setting).plan
    n_resident, over = _weight_bytes(whole), whole.total_bytes - cap_bytes
    found: list[Planned] = []
    for _ in range(3):  # more than once, as reading ahead takes memory of its own
        n_resident -= over
        if over <= 0 or n_resident < 0:
            break
        try:
            found = [plan(_with_streamed_weights(setting, n_resident))]
        except EdgedecError:  # the runtime can't, or not with so little
            break
        over = found[0].plan.total_bytes - cap_bytes
    return found


def _least_streamed(plan: Plan, setting: Setting) -> list[Planned]:
    """Return the setting that keeps the fewest bytes of the weights that the runtime can stream with, if it can."""
    least, most = 0, _weight_bytes(plan(setting).plan)
    found: list[Planned] = []
    while most - least > _CLOSE_BYTES:
        middle = (least + most) // 2
        try:
            found, most = [plan(_with_streamed_weights(setting, middle))], middle
        except EdgedecError:
            least = middle
    return found


def _with_streamed_weights(setting: Setting, resident_bytes: int) -> Setting:
    """Return the setting that keeps so many bytes of the weights in memory and reads the others in each forward."""
    return setting.less("weights", "weights read from storage as needed", {"resident_bytes": resident_bytes})


def _weight_bytes(plan: MemoryPlan) -> int:
    return sum(term.n_bytes for term in plan.terms if term.name.startswith("weights"))
