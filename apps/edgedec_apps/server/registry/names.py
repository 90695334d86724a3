"""What the name of a model in a request stands for: a model of the command line, a preset, or an installed model.

A request never names a path or an address: a name is compared with those that are known here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgedec.callers import did_you_mean
from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import read_model_info
from edgedec.gguf.model_kinds import embeds_only
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.new_preset import DEFAULT
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.models import FOREVER_S, ModelFile, Recipe
from edgedec_models.cache import list_models
from edgedec_models.catalogue import find_model
from edgedec_models.presets import Preset, find_preset, list_presets

_SCHEMES = ("hf:", "ollama:")
_MOST_HEADERS = 256  # that are remembered


@dataclass(frozen=True, slots=True)
class Named:
    """A name with what it stands for.

    Attributes:
        name: The name in answers.
        recipe: What is loaded for it.
        keep_s: Seconds for which the model stays loaded after a request that does not say it.
        n_ctx: The least tokens of the context, or None.
        system: The system message of a chat that has none; may be empty.
        options: Options of sampling for requests that do not give them.
        base: The name of the model that a preset is made of; else "".
    """

    name: str
    recipe: Recipe
    keep_s: float
    n_ctx: int | None = None
    system: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    def asked(self, keep_s: float | None, n_ctx: int | None = None) -> "Named":
        """Return this with what a request says of them: how long the model stays, and the least of its context."""
        return replace(self, keep_s=self.keep_s if keep_s is None else keep_s, n_ctx=n_ctx or self.n_ctx)

    def completed(self, texts: TextRequest) -> TextRequest:
        """Return a request with the system message and the options of this name, where the request has none."""
        return replace(
            texts,
            prompts=tuple(self._with_system(prompt) for prompt in texts.prompts),
            options={**self.options, **texts.options},
        )

    def _with_system(self, prompt: Any) -> Any:
        is_chat = isinstance(prompt, list) and self.system and prompt[0].get("role") != "system"
        return [{"role": "system", "content": self.system}, *prompt] if is_chat else prompt


class Names:
    """The names that a server knows (RequestError where two models of the command line have the same name).

    Attributes:
        served: The models of the command line, in its order.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.served = [_served(model) for model in settings.models]
        if len({served.name for served in self.served}) < len(self.served):
            raise RequestError("two models of the command line have the same name; rename the file of one")

    def find(self, name: str | None, only: Recipe | None = None) -> Named:
        """Return what a name stands for, with ":latest" or without.

        None stands for the first model served; so does "default", unless it is a name, or else for the model `only`.

        Raises:
            ApiError: No model has this name (404), or there is no name, and the server was started without a model.
            EdgedecError: A preset's file is damaged, or a folder can't be read.
        """
        if name is None:
            return self._first(None)
        for each in dict.fromkeys((name, name.removesuffix(":latest"))):
            if not self._is_ours(each) and (preset := find_preset(each)) is not None:
                return self._of_preset(preset)
            if (model := self.model(each)) is not None:
                return model
        if name.removesuffix(":latest") == DEFAULT:
            return self._first(only)
        hint = did_you_mean(name[:200], [served.name for served in self.all()])
        raise ApiError(
            f"there is no model {name!r:.200} here{hint or ';'} GET /v1/models lists the models, and edgedec pull or "
            "POST /api/pull fetches another",
            status=404,
            code="model_not_found",
            param="model",
        )

    def _is_ours(self, name: str) -> bool:
        """Return whether a name is the command line's, or "default", so that no preset can take it."""
        ours = (*(served.name for served in self.served), *self._settings.models, *self._settings.aliases, DEFAULT)
        return name in ours

    def _first(self, only: Recipe | None) -> Named:
        """Return the model for requests that name none (ApiError where there is none)."""
        for served in self.served or (self.all() if only is not None else ()):
            if self.served or served.recipe == only:
                return served
        raise ApiError("the field model is missing; name a model of GET /v1/models", param="model")

    def all(self) -> list[Named]:
        """Return all models: those of the command line, presets, installed ones; each name once.

        Raises:
            StorageError: A folder can't be read.
        """
        by_name = {served.name: served for served in self.served}
        for preset in list_presets():
            if preset.name not in by_name and not self._is_ours(preset.name) and self.model(preset.model) is not None:
                by_name[preset.name] = self._of_preset(preset)
        for name, path in _installed().items():
            by_name.setdefault(name, self._installed(path, name))
        return list(by_name.values())

    def model(self, name: str) -> Named | None:
        """Return the model of a name that is no preset's, or None."""
        for served, setting in zip(self.served, self._settings.models, strict=True):
            if name in (served.name, setting):
                return served
        if name in self._settings.aliases:
            return self.served[0]
        path = installed_file(name)
        if path is not None:
            return self._installed(path, name)
        entry = find_model(name)  # by an alias of the catalogue, such as qwen3:4b
        return self.model(entry.name) if entry is not None and entry.name != name else None

    def _installed(self, path: Path, name: str) -> Named:
        return Named(name, Recipe(str(path)), self._settings.keep_s)

    def _of_preset(self, preset: Preset) -> Named:
        base = self.model(preset.model)
        if base is None:
            raise ApiError(
                f"{preset.name!r} is a preset of {preset.model!r}, which is not on this machine; pull that first",
                status=404,
                code="model_not_found",
                param="model",
            )
        return _with_preset(base, preset)


def _served(model: str) -> Named:
    """Return what a name or a path of the command line stands for, whether it is downloaded already or not."""
    preset = None if Path(model).exists() else find_preset(model)
    name = model if preset is None else preset.model
    path = None if Path(name).exists() else _installed().get(name)  # as presets of the model have it
    base = Named(shown_name(name), Recipe(name if path is None else str(path)), FOREVER_S)
    return base if preset is None else _with_preset(base, preset)


def _with_preset(base: Named, preset: Preset) -> Named:
    """Return the name of a preset that is made of the model `base`."""
    return replace(
        base,
        name=preset.name,
        recipe=replace(
            base.recipe,
            chat_template=preset.template or base.recipe.chat_template,
            draft_head=preset.draft_head or base.recipe.draft_head,
            lora=preset.lora or base.recipe.lora,
        ),
        n_ctx=preset.n_ctx,
        system=preset.system,
        options=preset.sampling,
        base=base.name,
    )


def shown_name(model: str) -> str:
    """Return a model's name in answers: as the command line has it, without the folder of a path.

    >>> shown_name("~/tiny.gguf"), shown_name("smollm2-135m")
    ('tiny', 'smollm2-135m')
    """
    path = Path(model)
    if path.suffix.lower() == ".gguf" and not model.startswith(_SCHEMES):
        return path.stem
    return path.resolve().name if path.is_dir() else model


def installed_file(name: str, *, draft_head: bool = False) -> Path | None:
    """Return the file of a model on this machine by its name; None where there is none, and for every path.

    Args:
        name: A name that `edgedec list` shows, or one that begins with hf: or ollama:.
        draft_head: As ResolveOptions.draft_head.
    """
    if (path := _installed().get(name)) is not None or not name.startswith(_SCHEMES):
        return path
    try:
        return resolve(name, ResolveOptions(offline=True, draft_head=draft_head))
    except EdgedecError:
        return None


def _installed() -> dict[str, Path]:
    """Return the files of the models on this machine by name."""
    installed = [model for model in list_models() if model.complete and model.path.suffix.lower() == ".gguf"]
    return {model.name: model.path for model in installed}  # those of EDGEDEC_MODELS come last, and count more


def with_files(entries: Iterable[Named]) -> list[tuple[Named, ModelFile | None]]:
    """Return models with their files; None for a file that is not on this machine."""
    return [(served, model_file(served.recipe)) for served in entries]


def model_file(recipe: Recipe) -> ModelFile | None:
    """Return what the header of a model's file says, or None where the file is not on this machine."""
    try:
        path = resolve(recipe.model, ResolveOptions(offline=True))
        stat = standing(path).stat()
    except (EdgedecError, OSError):
        return None
    file = _read(path, stat.st_mtime_ns, stat.st_size)
    return file if recipe.chat_template is None else replace(file, template=recipe.chat_template)


@lru_cache(_MOST_HEADERS)
def _read(path: Path, mtime_ns: int, n_bytes: int) -> ModelFile:
    """Read a file's header; time and size are those of the file, so that another file is read again."""
    try:
        template = get_text(read_header_of(path), "tokenizer.chat_template")
    except EdgedecError:
        template = None
    return ModelFile(path, read_model_info(path), mtime_ns / 1e9, template, embeds_only(path))
