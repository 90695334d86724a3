"""Folders: models in the cache, the user's own models (EDGEDEC_MODELS) and the configuration.

The cache, below its root:

    models/NAME.gguf                            models of the catalogue, and files that the user put there
    models/hf/OWNER/REPO/REVISION/FILE.gguf     from a Hugging Face hub
    models/url/HASH/FILE.gguf                   from a URL; HASH is of the URL
    heads/NAME.gguf, heads/NAME/                draft heads that the user put there
    heads/HASH.path                             where a draft head lies that was trained here, or fetched by name
"""

import os
import re
from pathlib import Path

from edgedec.storage.cache_files import cache_folder

_PLAIN_NAME = re.compile(r"[^./\\:\x00][^/\\:\x00]*")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d) *(\..*)?", re.IGNORECASE)


def models_folder(cache_dir: Path | None = None) -> Path:
    """Return the folder of models below a cache's root; None stands for the default root."""
    return cache_folder(cache_dir) / "models"


def own_folder() -> Path | None:
    """Return EDGEDEC_MODELS, the user's own folder of models, which edgedec only reads; None where it is not set."""
    folder = os.environ.get("EDGEDEC_MODELS")
    return Path(folder).expanduser() if folder else None


def config_folder() -> Path:
    """Return the folder of the user's catalogue.toml: EDGEDEC_CONFIG, or the platform's default."""
    if folder := os.environ.get("EDGEDEC_CONFIG"):
        return Path(folder).expanduser()
    from platformdirs import user_config_path  # here, as it takes long to import

    return user_config_path("edgedec", appauthor=False)


def is_plain(name: str) -> bool:
    """Tell whether `name` can be the name of a file in a folder: no separators, no drive, no leading dot, no device."""
    return _PLAIN_NAME.fullmatch(name) is not None and not is_device(name)


def is_device(name: str) -> bool:
    """Tell whether a file of this name is a device on some system: what is written there is lost.

    >>> is_device("nul.gguf"), is_device("Con"), is_device("console.gguf")
    (True, True, False)
    """
    return _DEVICE.fullmatch(name) is not None


def flat_path(name: str, folder: Path) -> Path:
    """Return the path of the model with a plain name in a folder."""
    return folder / f"{name}.gguf"
