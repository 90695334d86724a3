"""Plans and loads the models of a server, each within the memory that the server has for all of them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from edgedec.api.engine import Engine, save_draft_store
from edgedec.api.load import asked_plan, open_chosen
from edgedec.api.options import Application, EngineOptions
from edgedec.api.plan import find_model
from edgedec.errors import EdgedecError, MemoryCapError
from edgedec.gguf.file import FileState, file_states
from edgedec.gguf.model_info import read_model_info, trained_context
from edgedec.gguf.model_kinds import embeds_only
from edgedec.gguf.places import standing
from edgedec.load_plan import LoadPlan
from edgedec.loading.resolve import resolve
from edgedec.memory.planner import plan_wishes, plan_within
from edgedec.memory.setting import Cap, planning_bytes
from edgedec.memory.shedding import give_back
from edgedec.memory.system import available_bytes, peak_resident_bytes, resident_bytes
from edgedec.memory.terms import REQUESTS, RESERVE
from edgedec.memory_plan import MemoryPlan, format_bytes
from edgedec.progress import CancelToken, OnProgress
from edgedec_apps.base_memory import LEFT_BYTES, base_bytes
from edgedec_apps.fit_first import require_fit
from edgedec_apps.machine_speed import keep_speed
from edgedec_apps.server.registry.models import CrowdedError, Loaded, ModelFile, Prepared, Recipe
from edgedec_apps.texts import adapter

_IN_EACH_PLAN_BYTES = 9_000_000  # 5 MB of code and 4 MB of Python's working memory: both stay after the model
_PLANNING_BYTES = 8_000_000  # measured with 260 tokens
_MOST_PLANNING_BYTES = 80_000_000  # measured with 262,144 tokens: 65 MB


@dataclass(slots=True)
class Account:
    """Whose memory is whose. Used under the turn of a registry: by one thread at a time.

    A model that was unloaded leaves something behind: modules that were imported for it, blocks that the heap can't
    give back. Each plan keeps LEFT_BYTES for that from the first on, so that no plan depends on what was loaded before.
    More may be left where a model brought a large library; so what the process holds without models is measured again
    whenever no model is loaded, less the part that every model's plan counts. While models are loaded, what they did
    not hold when their loading had ended counts as held beside them.

    Args:
        first_bytes: Bytes that the process holds before any model's file is looked at.

    Attributes:
        base_bytes: Bytes that the process may hold without a model, beyond what each plan counts.
    """

    first_bytes: int
    base_bytes: int = field(init=False)
    _models: dict[object, tuple[int, int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.base_bytes = self.first_bytes + LEFT_BYTES

    @property
    def others(self) -> bool:
        """Whether a model is loaded."""
        return bool(self._models)

    @property
    def planned_bytes(self) -> int:
        """The most bytes that the loaded models may hold together."""
        return sum(planned for planned, _, _ in self._models.values())

    @property
    def asked_bytes(self) -> int:
        """The same by the plans before they were loaded; a model without a cap has no other plan."""
        return sum(asked for _, _, asked in self._models.values())

    def measure(self) -> int:
        """Return the bytes that the process may hold beside its models."""
        if not self._models:
            give_back()  # what the requests since the last unloading have freed
        without = (resident_bytes() or 0) - sum(held for _, held, _ in self._models.values()) - _IN_EACH_PLAN_BYTES
        if not self._models:
            self.base_bytes = max(self.first_bytes + LEFT_BYTES, without)
        return max(self.base_bytes, without)

    def open(self, model: object, planned_bytes: int, before_bytes: int, asked_bytes: int = 0) -> None:
        """Enter a model that was loaded.

        Args:
            model: Stands for the model.
            planned_bytes: The most bytes that the model may hold.
            before_bytes: What the process held before it was loaded.
            asked_bytes: The most bytes by the plan before it was loaded.
        """
        self._models[model] = planned_bytes, max(0, (resident_bytes() or 0) - before_bytes), asked_bytes

    def close(self, model: object) -> None:
        """Strike a model off that was unloaded; a second call does nothing."""
        self._models.pop(model, None)


def planning_need(path: Path) -> int:
    """Return the most bytes that are held for a while to plan a model, whose header and vocabulary are read for it.

    They grow with the vocabulary, whose size is not known before; but a file is larger than its vocabulary, and more
    than 262,144 tokens are not expected.
    """
    if not standing(path).is_file():  # the folder of an export
        return _MOST_PLANNING_BYTES
    return min(_PLANNING_BYTES + standing(path).stat().st_size // 2, _MOST_PLANNING_BYTES)


_USABLE = 0.9  # of the memory that the system has free when the server starts
_OF_ALL = (REQUESTS, RESERVE)  # the terms of a plan that all models of a server share
_ANY_PEAK = 1 << 62  # other models are loaded: what the process held at its peak says nothing of one of them


@dataclass(frozen=True)
class Opener:
    """Plans and loads models; its method `prepare` is a registry's Prepare.

    Without `options.memory`, nine tenths of what the system had free at the first call are for the models.

    Attributes:
        listed: The models that the command line names, in the form in which a recipe names its model.
        options: How these are loaded.
        others: How all other models are loaded.
        request_bytes: Bytes that the server keeps for requests; 0 without a cap.
        showing: Returns a context in which a model is prepared or loaded; it yields what the progress is reported to.
        tell: Called with sentences for the person who started the server.
    """

    listed: Sequence[str]
    options: EngineOptions
    others: EngineOptions
    request_bytes: int
    showing: Callable[[], AbstractContextManager[OnProgress | None]]
    tell: Callable[[str], None]
    _refused: dict[tuple[Recipe, int | None], tuple[FileState, str]] = field(default_factory=dict, init=False)

    @cached_property
    def _account(self) -> Account:
        return Account(base_bytes())  # before any model's file is looked at

    @cached_property
    def _cap(self) -> Cap:
        base, cap_bytes, gpu_bytes = self._account.base_bytes, self.options.cap_bytes, self.options.gpu_cap_bytes
        if cap_bytes is not None:
            beside = f"measured, and {format_bytes(LEFT_BYTES)} for what models leave behind"
            return Cap(cap_bytes, base, whole_process=True, beside=beside, gpu_bytes=gpu_bytes)
        free = available_bytes()
        most = None if free is None else base + int(_USABLE * free)
        return Cap(most, base, whole_process=True, name="free", gpu_bytes=gpu_bytes)

    def prepare(self, recipe: Recipe, n_ctx: int | None, cancel: CancelToken, *, at_rest: bool = False) -> Prepared:
        """Plan how a recipe is loaded, as if it were alone; a model of the command line is downloaded where it must be.

        Args:
            n_ctx: Tokens of its context, or None for the usual number.
            cancel: Stops planning and loading.
            at_rest: Whether no request uses a model that is loaded, so that none comes to hold more meanwhile.

        Raises:
            CrowdedError: The models that are loaded leave no memory to plan with.
            MemoryCapError: The model can't fit.
            EdgedecError: As edgedec.load.
        """
        options = self._options(recipe, n_ctx, cancel)
        cap, account = self._cap, self._account
        beside_bytes, is_capped = account.measure(), options.memory is not None
        earlier_peak_bytes = _ANY_PEAK if account.others else peak_resident_bytes() or 0
        cap = replace(cap, beside_bytes=account.base_bytes, earlier_peak_bytes=earlier_peak_bytes)
        application = Application(
            cap.beside_bytes if is_capped else None,
            request_bytes=self.request_bytes if is_capped else 0,
            earlier_peak_bytes=cap.earlier_peak_bytes,
        )
        held_bytes = (resident_bytes() or 0) if at_rest else beside_bytes + account.planned_bytes
        with self.showing() as on_progress:
            options = replace(options, on_progress=on_progress)
            if is_capped:
                require_fit(recipe.model, options, application, cap)
            path = resolve(recipe.model, options.resolving)
            if account.others and cap.n_bytes is not None and cap.n_bytes - held_bytes < planning_need(path):
                raise self._crowded(recipe, n_ctx, path)
            room = planning_bytes(replace(cap, beside_bytes=held_bytes))
            writes = account.others and not at_rest  # a text may be written meanwhile
            chosen = find_model(path, options, room, measure=not writes)
            wishes = asked_plan(chosen, options, application, room)
            plan = plan_wishes(wishes, cap)
            if not plan.memory.fits:
                plan = plan_within(wishes, cap)
                self._require(plan.memory, recipe, n_ctx, path)
        if "context" not in plan.given_up:  # so that it does not depend on what else is loaded by then
            options = replace(options, n_ctx=plan.options.n_ctx)
        own_bytes = beside_bytes + account.asked_bytes + plan.memory.own_bytes  # and what all models share
        n_bytes = plan.memory.own_bytes - sum(_shared(plan.memory).values())
        return Prepared(
            fits=not account.others or cap.n_bytes is None or own_bytes <= cap.n_bytes,
            n_ctx=plan.options.n_ctx or 0,
            n_ctx_train=trained_context(chosen.path),
            open=lambda: self._open(chosen, options, application, n_bytes),
        )

    def _require(self, plan: MemoryPlan, recipe: Recipe, n_ctx: int | None, path: Path) -> None:
        """Raise MemoryCapError where a plan does not fit, and remember that for this state of the model's file."""
        try:
            plan.require()
        except MemoryCapError as error:
            self._refused[recipe, n_ctx] = file_states([path])[0], error.marked
            raise

    def _crowded(self, recipe: Recipe, n_ctx: int | None, path: Path) -> MemoryCapError:
        """Return the error for a model that can't be planned now: that it can never fit, where this is known."""
        state, message = self._refused.get((recipe, n_ctx), (None, ""))
        if state == file_states([path])[0]:
            return MemoryCapError(message)
        message = f"{path.stem}: the models that are loaded leave no memory to plan it; try again later"
        return CrowdedError(message, partial(self.prepare, at_rest=True))

    def _options(self, recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> EngineOptions:
        options = self.options if recipe.model in self.listed else self.others
        return replace(
            options,
            n_ctx=n_ctx or options.n_ctx,
            chat_template=recipe.chat_template or options.chat_template,
            draft_head=recipe.draft_head or options.draft_head,
            lora=tuple(map(adapter, recipe.lora.splitlines())) or options.lora,
            cancel=cancel,
        )

    def _open(self, chosen: LoadPlan, options: EngineOptions, application: Application, n_bytes: int) -> Loaded:
        before_bytes = resident_bytes() or 0
        with self.showing() as on_progress:
            engine = open_chosen(chosen, replace(options, on_progress=on_progress), application)
        model = object()  # stands for the engine, and does not hold it
        try:
            template = engine.card.chat_template if options.chat_template is None else options.chat_template
            path = chosen.path
            file = ModelFile(path, read_model_info(path), standing(path).stat().st_mtime, template, embeds_only(path))
        except BaseException:
            engine.close()
            raise
        if engine.plan.given_up:
            cap = engine.plan.caps
            self.tell(f"{path.stem}: to keep within {cap}: {', '.join(engine.plan.given_up)}")
        shared = _shared(engine.plan)
        self._account.open(model, engine.plan.own_bytes - sum(shared.values()), before_bytes, n_bytes)

        def close() -> None:
            try:
                self._close(path, engine)
            finally:
                self._account.close(model)

        return Loaded(engine, file, close, n_bytes, shared.get(REQUESTS))

    def _close(self, path: Path, engine: Engine) -> None:
        """Save the draft store and the model's speed, and free the model; a failure to save is only reported."""
        keep_speed(path, engine)
        try:
            save_draft_store(engine)
        except EdgedecError as error:
            self.tell(str(error))
        finally:
            engine.close()


def _shared(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of a plan's terms that all models of a server share, by name."""
    return {term.name: term.n_bytes for term in plan.terms if term.name in _OF_ALL}
