"""From a model's name to its file."""

import os
from pathlib import Path

from edgedec import plugins
from edgedec.errors import ModelNotFoundError, StorageError, argument
from edgedec.gguf.file import NO_SUCH_FILE, storage_error
from edgedec.gguf.places import model_place, standing
from edgedec.load_options import ResolveOptions


def resolve(model: str | os.PathLike[str], options: ResolveOptions, option: str = "") -> Path:
    """Return the file that a model's name stands for. An existing path wins over every other meaning of the name.

    An error names the argument `option`, where the model is a further one that it names.

    The resolvers (plug-ins of the group `edgedec.resolvers`) are asked in turn; one of them may download the file.

    Raises:
        ModelNotFoundError, PullError, OfflineError: No model has this name, or its file can't be downloaded.
        StorageError: The system doesn't let anybody look whether the path exists, and no resolver knows the name.
    """
    name = os.fspath(model)
    if "\0" in name or not name:
        raise ModelNotFoundError(f"{name!r} is no model name; give a path or a name that edgedec list shows")
    unreadable: StorageError | None = None
    try:
        stands = standing(Path(name))
        os.stat(name if stands == Path(name) else stands)
        return model_place(Path(model))
    except OSError as error:
        unreadable = None if error.errno in NO_SUCH_FILE else storage_error(Path(model), error)
    except ValueError:  # the name can't be a path
        pass
    try:
        for plugin in plugins.plugins(plugins.RESOLVERS).values():
            path: Path | None = plugin.load()(name, options)
            if path is not None:
                return path
        raise ModelNotFoundError(f"no file and no model is called {name!r}; edgedec list shows the names known")
    except ModelNotFoundError as error:
        if unreadable is not None:
            raise unreadable from error
        if option:
            raise ModelNotFoundError(f"{argument(option)}: {error.marked}") from error
        raise
