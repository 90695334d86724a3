"""Whether a model can chat, as its header tells before anything is loaded."""

from edgedec.errors import TemplateError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.progress import CancelToken
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.preset_options import preset_of
from edgedec_apps.cli.shown.progress import ProgressLine


def require_template(name: str, flags: LoadFlags, cancel: CancelToken, *, quiet: bool) -> None:
    """Find a model, which may be downloaded, and look in its header for a chat template; its weights are not read.

    Nothing is looked at where the options or the preset of this name bring a template.

    Raises:
        TemplateError: The model has no chat template.
        EdgedecError: There is no such model, it can't be downloaded, or its header is damaged.
    """
    preset = preset_of(name)
    if flags.chat_template is not None or (preset is not None and preset.template):
        return
    with ProgressLine(quiet=quiet) as on_progress:
        found = name if preset is None else preset.model
        path = resolve(found, ResolveOptions(cache_folder(), flags.offline, on_progress, cancel))
    if not describe(read_header_of(path)).has_chat_template:
        raise TemplateError(
            f"{name} has no chat template; give a prompt to continue (edgedec run), or --chat-template FILE"
        )
