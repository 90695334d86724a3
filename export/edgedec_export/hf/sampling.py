"""The sampling that a checkpoint's generation_config.json recommends, as the `general.sampling.*` keys of a GGUF."""

from pathlib import Path

from edgedec.errors import ModelFormatError
from edgedec_export.gguf_writer import Entry, real_number, whole_number
from edgedec_runtimes.weights.safetensors import read_json

_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_WHOLE = "top_k"


def sampling_entries(folder: Path) -> list[Entry]:
    """Return an entry for each recommended value; none where there is no such file, or it asks for greedy decoding.

    Raises:
        ModelFormatError: The file is damaged, or a value is no number from 0 up.
    """
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("do_sample") is False:
        return []
    entries: list[Entry] = []
    for name, key in _KEYS.items():
        value = config.get(name)
        if value is None:
            continue
        kind = int if name == _WHOLE else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ModelFormatError(f"{path}: {name} is {value!r:.40}; it must be a number from 0 up")
        entries.append((key, whole_number(int(value)) if name == _WHOLE else real_number(value)))
    return entries
