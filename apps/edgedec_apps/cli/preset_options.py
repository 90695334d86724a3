"""What a preset gives to the commands that load a model by its name: defaults for options that are not given."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgedec_apps.texts import adapter

if TYPE_CHECKING:
    from edgedec.api.options import EngineOptions
    from edgedec_models.presets import Preset


def preset_of(model: str) -> "Preset | None":
    """Return the preset of a name, or None where the name is a path or no preset's.

    Raises:
        ModelFormatError: The preset's file is damaged.
    """
    from edgedec_models.presets import find_preset

    return None if os.path.exists(model) else find_preset(model)


def with_preset(model: str, options: dict[str, Any], system: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the options of a generation and the system message, with those of a preset where they are not given."""
    preset = preset_of(model)
    if preset is None:
        return options, system
    return preset.sampling | options, preset.system or None if system is None else system


def loading(preset: "Preset", options: "EngineOptions") -> "EngineOptions":
    """Return the options of loading, with those of a preset where they are not given."""
    return replace(
        options,
        n_ctx=preset.n_ctx if options.n_ctx is None else options.n_ctx,
        chat_template=options.chat_template or preset.template or None,
        draft_head=options.draft_head or preset.draft_head or None,
        lora=options.lora or tuple(map(adapter, preset.lora.splitlines())),
    )
