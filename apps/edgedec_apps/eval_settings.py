"""The settings that an evaluation compares, and from them the lanes that evaluate."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from edgedec.choosing import choose_runtime
from edgedec.draft_loading import same_tokenizer
from edgedec.errors import RequestError
from edgedec.model import LayerSet, LoadOptions, Model
from edgedec_apps.evaluation import Lane

DEFAULT_KV_TYPE = "f16"
ALL_LAYERS = "all"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run a model.

    Attributes:
        model: The model's name, as it was given.
        path: Its file.
        runtime: The name of the runtime.
        kv_type: Element type of the KV cache.
        layers: The layers to run, as ranges (first, last) in order; None for all.
    """

    model: str
    path: Path
    runtime: str
    kv_type: str = DEFAULT_KV_TYPE
    layers: Ranges | None = None

    @property
    def name(self) -> str:
        """What differs from setting to setting."""
        return self.kv_type if self.layers is None else f"{self.kv_type}, layers {layers_text(self.layers)}"


def parse_layers(text: str) -> Ranges | None:
    """Return the ranges of layers that a text names, in order and joined where they touch; None for "all".

    >>> parse_layers("14-29,0-11,12"), parse_layers("all")
    (((0, 12), (14, 29)), None)

    Raises:
        RequestError: It names none.
    """
    if text.strip() == ALL_LAYERS:
        return None
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, flags=re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise RequestError(f"--layers {text!r}: write layers from 0 and ranges of them, such as 0-11,14-29, or all")
        ranges.append((first, last))
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def layers_text(layers: Ranges | None) -> str:
    """Return layers as parse_layers reads them.

    >>> layers_text(((0, 12), (14, 14))), layers_text(None)
    ('0-12,14', 'all')
    """
    if layers is None:
        return ALL_LAYERS
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in layers)


def combine(base: Setting, kv_types: Sequence[str], layers: Sequence[Ranges | None]) -> list[Setting]:
    """Return each KV type with each set of layers, once; `base` gives what neither names."""
    found = [replace(base, kv_type=kv_type, layers=one) for kv_type, one in product(kv_types, layers)]
    return list(dict.fromkeys(found))


def open_lanes(
    settings: Sequence[Setting], options: LoadOptions, n_window: int, stack: ExitStack
) -> tuple[list[Lane], Model]:
    """Load what the settings need, each model file once per runtime and KV type; `stack` closes it.

    Returns:
        A lane of `n_window` tokens for each setting, and the model of the last.

    Raises:
        RequestError: The models' vocabularies differ, a layer or the window is beyond the model.
        CapabilityError: The runtime can't leave out layers.
        EdgedecError: As Runtime.load.
    """
    keys = [(setting.path, setting.runtime, setting.kv_type) for setting in settings]
    n_lanes, models = Counter(keys), dict[tuple[Path, str, str], Model]()
    lanes = []
    for setting, key in zip(settings, keys, strict=True):
        if key not in models:
            runtime = choose_runtime(setting.path, setting.runtime).runtime
            loading = replace(options, kv_type=setting.kv_type, n_ctx=n_window, n_parallel=n_lanes[key])
            models[key] = stack.enter_context(runtime.load(setting.path, loading))
            _require_window(models[key], n_window)
        layers = _layer_set(setting, models[key])
        lanes.append(Lane(setting.name, models[key].session(n_window), layers))
    for setting, key in zip(settings, keys, strict=True):
        if setting.path != settings[0].path:
            _require_vocabulary(models[keys[0]], models[key], settings[0], setting)
    return lanes, models[keys[-1]]


def _require_window(model: Model, n_window: int) -> None:
    trained = model.card.n_ctx_train
    if 0 < trained < n_window:
        raise RequestError(f"--window is {n_window}; the model was trained for {trained} tokens, so use at most that")


def _layer_set(setting: Setting, model: Model) -> LayerSet | None:
    """Return the mask of a setting's layers (CapabilityError, RequestError)."""
    if setting.layers is None:
        return None
    model.capabilities.require("layers", setting.runtime)
    n_layer = model.card.n_layer
    if setting.layers[-1][1] >= n_layer:
        raise RequestError(
            f"--layers {layers_text(setting.layers)}: {setting.model} has {n_layer} layers, 0 to {n_layer - 1}"
        )
    return LayerSet.of(n_layer, [layer for first, last in setting.layers for layer in range(first, last + 1)])


def _require_vocabulary(base: Model, model: Model, base_setting: Setting, setting: Setting) -> None:
    """Raise RequestError unless a row of logits means the same in both models."""
    ours, theirs = model.card.n_vocab, base.card.n_vocab
    if ours == theirs and same_tokenizer(model, base):
        return
    found = f"{ours} and {theirs} tokens" if ours != theirs else f"{ours} tokens each, but others"
    raise RequestError(
        f"the vocabularies of {setting.model} and {base_setting.model} differ ({found}); --against takes a model of "
        "the same vocabulary, such as another quantization of the same model"
    )
