"""edgedec create: make a preset."""

import os
from pathlib import Path
from typing import Annotated, Any

from edgedec.errors import ModelNotFoundError, RequestError
from edgedec.load_options import ResolveOptions
from edgedec_apps.cli import completion
from edgedec_apps.cli.declared import argument, model_flag
from edgedec_apps.cli.options import Adapters, Quiet, System, parsed
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.cli.shown.terminal import say
from edgedec_apps.texts import adapter, read_text


def command(
    name: Annotated[str, argument("NAME", "The preset's name.")],
    model: Annotated[
        str, argument("MODEL", "The model, or the preset, that it is made of.", complete=completion.any_model)
    ],
    *,
    system: System = None,
    chat_template: Path | None = model_flag(
        "--chat-template FILE", "Jinja file to use instead of the model's own template."
    ),
    draft_head: str | None = model_flag(
        "--draft-head HEAD", "A trained draft head for the model, or off.", complete=completion.draft_head
    ),
    lora: Adapters = None,
    option: list[str] | None = model_flag(
        "--option NAME=VALUE", "An option of sampling, such as temperature=0.2, stop=END, or n_ctx=8192. Repeatable."
    ),
    quiet: Quiet = False,
) -> None:
    """Make a preset: a name for a model with its own system message, template, options, adapters or head.

    It is a small TOML file, which edgedec rm deletes. Requests to edgedec serve can name it at once.
    """
    from edgedec_apps.new_preset import new_preset
    from edgedec_models.presets import has_preset, save_preset
    from edgedec_models.resolve import resolve

    template = None if chat_template is None else read_text(chat_template)
    system = argument_text(system, "--system")
    texts = {"system": system, "template": template, "draft_head": draft_head, "lora": _adapters(lora)}
    preset = new_preset(name, model, texts, _options(option or []))
    if not has_preset(model):
        resolve(model, ResolveOptions(offline=True))
    path = save_preset(preset)
    if not quiet:
        say(f"{name}: {path}")


def _adapters(adapters: list[str] | None) -> str | None:
    """Return adapters as a preset has them, with absolute paths; None where none are given.

    Raises:
        ModelNotFoundError: There is no such file or folder.
    """
    if adapters is None:
        return None
    for path, _ in map(adapter, adapters):
        if not Path(path).exists() or "\n" in path:
            raise ModelNotFoundError(f"--lora is {path!r:.200}; there is no such file or folder")
    return "\n".join(os.path.abspath(text) for text in adapters)  # the scale stays at the end


def _options(assignments: list[str]) -> dict[str, Any]:
    """Return options by name; a value that is no number and no truth value is a text.

    >>> _options(["top_k=5", "temperature=0.5", "ignore_end=true", "stop=a", "stop=b"])
    {'top_k': 5, 'temperature': 0.5, 'ignore_end': True, 'stop': ['a', 'b']}
    """
    options: dict[str, Any] = {}
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign:
            raise RequestError(f"--option is {text!r:.100}; write NAME=VALUE, such as temperature=0.2")
        if name == "stop":
            options.setdefault(name, []).append(value)
        else:
            options[name] = parsed(value)
    return options
