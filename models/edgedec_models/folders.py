"""Where models lie: the cache, the user's own folder (EDGEDEC_MODELS) and the configuration folder.

The cache, below its root:

    models/NAME.gguf                            catalogue entries, and files put there by hand
    models/hf/OWNER/REPO/REVISION/FILE.gguf     from a Hugging Face hub
    models/url/HASH/FILE.gguf                   from a URL; HASH is of the URL
"""

import os
import re
from pathlib import Path

PLAIN_NAME = re.compile(r"[^./\\:\x00][^/\\:\x00]*")


def cache_folder() -> Path:
    """Return the root of the cache: EDGEDEC_CACHE or the platform's default."""
    if root := os.environ.get("EDGEDEC_CACHE"):
        return Path(root).expanduser()
    from platformdirs import user_cache_path  # here: it costs more than a look-up that knows its folder

    return user_cache_path("edgedec", appauthor=False)


def models_folder(cache_dir: Path | None = None) -> Path:
    """Return the folder of the cache that holds models."""
    return (cache_folder() if cache_dir is None else cache_dir) / "models"


def own_folder() -> Path | None:
    """Return the user's own folder of models (EDGEDEC_MODELS), which edgedec only reads; None when there is none."""
    folder = os.environ.get("EDGEDEC_MODELS")
    return Path(folder).expanduser() if folder else None


def config_folder() -> Path:
    """Return the folder of the user's catalogue.toml: EDGEDEC_CONFIG or the platform's default."""
    if folder := os.environ.get("EDGEDEC_CONFIG"):
        return Path(folder).expanduser()
    from platformdirs import user_config_path  # here: see models_folder

    return user_config_path("edgedec", appauthor=False)


def is_plain(name: str) -> bool:
    """Tell whether `name` can be the name of one file in a folder: no separators, no drive, no leading dot."""
    return PLAIN_NAME.fullmatch(name) is not None


def flat_path(name: str, models: Path) -> Path:
    """Return where the cache holds the model of a plain name."""
    return models / f"{name}.gguf"
