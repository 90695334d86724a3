"""The settings that an evaluation compares, and the lanes that evaluate them."""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.loading.second_model import same_tokenizer
from edgedec.model import LayerSet, Model
from edgedec_apps.evaluation.evaluate import Lane
from edgedec_runtimes.layer_skip.choose import choose_layers
from edgedec_runtimes.layer_skip.layer_sets import tuned_set

DEFAULT_KV_TYPE = "f16"
ALL_LAYERS = "all"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RunSetting:
    """A way to run a model.

    Attributes:
        model: The model's name, as on the command line.
        path: The model's file.
        runtime: The name of the runtime.
        kv_type: Element type of the KV cache.
        layers: The layers to run, as ranges (first, last) in order; None for all.
        layer_skip: The speed-up of `--method layer-skip`, for which layers are left out; None for no such option.
    """

    model: str
    path: Path
    runtime: str
    kv_type: str = DEFAULT_KV_TYPE
    layers: Ranges | None = None
    layer_skip: float | None = None

    @property
    def name(self) -> str:
        """The name of the setting: what differs from setting to setting."""
        return setting_name(self.kv_type, layers_text(self.layers), self.layer_skip)


def setting_name(kv_type: str, layers: str, layer_skip: float | None) -> str:
    """Return the name of a setting: what differs from setting to setting.

    >>> setting_name("f16", "all", None), setting_name("q8_0", "0-9,11", None), setting_name("f16", "all", 1.2)
    ('f16', 'q8_0, layers 0-9,11', 'f16, skip 1.2')
    """
    name = kv_type if layers == ALL_LAYERS else f"{kv_type}, layers {layers}"
    return name if layer_skip is None else f"{name}, skip {layer_skip:g}"


def parse_layers(text: str) -> Ranges | None:
    """Return the ranges of layers in a text, in order, with adjacent ones joined; None for "all".

    >>> parse_layers("14-29,0-11,12"), parse_layers("all")
    (((0, 12), (14, 29)), None)

    Raises:
        RequestError: The text is no list of layers and ranges.
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
    """Return ranges of layers as a text for parse_layers.

    >>> layers_text(((0, 12), (14, 14))), layers_text(None)
    ('0-12,14', 'all')
    """
    if layers is None:
        return ALL_LAYERS
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in layers)


def combine(
    base: RunSetting, kv_types: Sequence[str], layers: Sequence[Ranges | None], layer_skips: Sequence[float] = ()
) -> list[RunSetting]:
    """Return `base` with each KV type and each set of layers or layer skip, without duplicates."""
    sets = [replace(base, layers=one) for one in layers] + [replace(base, layer_skip=one) for one in layer_skips]
    settings = [replace(one, kv_type=kv_type) for kv_type, one in product(kv_types, sets)]
    return list(dict.fromkeys(settings))


def open_lanes(
    settings: Sequence[RunSetting], options: LoadOptions, n_window: int, stack: ExitStack
) -> tuple[list[Lane], Model]:
    """Load the models of settings, each file once per runtime and KV type; `stack` closes them.

    Returns:
        A lane of `n_window` tokens for each setting, and the model of the last setting.

    Raises:
        RequestError: The vocabularies differ, or the model has no such layer or is not trained for the window.
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
            trained = models[key].card.n_ctx_train
            if 0 < trained < n_window:
                what = f"--window is {n_window}; the model was trained for {trained} tokens, use at most that"
                raise RequestError(what)
        chosen = _chosen(setting, models[key], options)
        lanes.append(Lane(setting.name, models[key].session(n_window), *chosen))
    for setting, key in zip(settings, keys, strict=True):
        if setting.path != settings[0].path:
            _require_vocabulary(models[keys[0]], models[key], settings[0], setting)
    return lanes, models[keys[-1]]


def _chosen(setting: RunSetting, model: Model, options: LoadOptions) -> tuple[LayerSet | None, float]:
    """Return the layers of a setting, None for all, and the share of the bytes that a token reads."""
    if setting.layers is None and setting.layer_skip is None:
        return None, 1.0
    model.capabilities.require("layers", setting.runtime)
    sizes = layer_bytes(setting.path)
    if setting.layer_skip is not None:
        chosen = choose_layers(sizes, setting.layer_skip, tuned_set(options.cache_dir, model.card, lossy=True))
        return chosen.layers, chosen.share
    layers = _named_layers(setting, setting.layers or (), model)
    return layers, sizes.share(layers)


def _named_layers(setting: RunSetting, ranges: Ranges, model: Model) -> LayerSet:
    """Return the set of the layers in some ranges (RequestError where the model has no such layer)."""
    n_layer = model.card.n_layer
    if ranges[-1][1] >= n_layer:
        raise RequestError(f"--layers {layers_text(ranges)}: {setting.model} has {n_layer} layers, 0 to {n_layer - 1}")
    return LayerSet.of(n_layer, [layer for first, last in ranges for layer in range(first, last + 1)])


def _require_vocabulary(base: Model, model: Model, base_setting: RunSetting, setting: RunSetting) -> None:
    """Raise RequestError unless a row of logits means the same in both models."""
    ours, theirs = model.card.n_vocab, base.card.n_vocab
    if ours == theirs and same_tokenizer(model, base):
        return
    sizes = f"{ours} and {theirs} tokens" if ours != theirs else f"{ours} tokens each, but others"
    raise RequestError(
        f"the vocabularies of {setting.model} and {base_setting.model} differ ({sizes}); --against takes a model of "
        "the same vocabulary, such as another quantization of the same model"
    )
