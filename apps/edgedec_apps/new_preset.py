"""Makes a preset from a model or from another preset."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgedec.chat import open_template
from edgedec.errors import ModelNotFoundError, RequestError
from edgedec_models.cache import list_models
from edgedec_models.catalogue import find_model
from edgedec_models.presets import Preset, find_preset

DEFAULT = "default"
"""What clients call a model that they need not choose; never a preset."""


def new_preset(name: str, base: str, texts: Mapping[str, str | None], options: Mapping[str, Any]) -> Preset:
    """Return a preset, not yet saved.

    Args:
        name: The preset's name.
        base: The name of a model, or of a preset, whose settings are taken over.
        texts: The `system`, `template`, `draft_head` and `lora` that replace those of the base; None keeps the base's.
        options: Options that replace or join those of the base.

    Raises:
        RequestError: The name is a model's, or no name; an option is out of range; the template does not compile.
        ModelNotFoundError: The base is a path.
        ModelFormatError: The base is a damaged preset.
    """
    if any(mark in base for mark in "/\\") and not base.startswith(("hf:", "ollama:")):
        raise ModelNotFoundError(f"{base!r:.200} is a path; a preset is made of a model with a name (edgedec list)")
    if name != name.strip() or not name.isprintable() or "#" in name or name.lower() == DEFAULT:
        rule = f"give a printable one without #, without spaces at its ends, and not {DEFAULT!r}"
        raise RequestError(f"{name!r:.200} is no name for a preset; {rule}")
    if find_model(name) is not None or any(model.name == name for model in list_models()):
        raise RequestError(f"{name!r} is the name of a model; give the preset another name")
    older = find_preset(base)
    start = Preset(name, base) if older is None else replace(older, name=name)
    changes = {key: text for key, text in texts.items() if text is not None}
    preset = replace(start, **changes, options={**start.options, **options})
    if preset.template:
        open_template(preset.template, bos_token="", eos_token="")
    return preset
