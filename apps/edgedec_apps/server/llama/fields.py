"""llama-server's fields: the names that it has for options of sampling, and adapters."""

from pathlib import Path
from typing import Any

from edgedec.api.engine import Engine
from edgedec.api.requests import adapter_scales
from edgedec.errors import RequestError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Reading

LLAMA_NAMES = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n", "ignore_eos": "ignore_end"}
"""What llama-server calls options of sampling, and what edgedec calls them."""


def read_lora(fields: Fields, engine: Engine, name: str = "lora") -> tuple[float, ...] | None:
    """Return the scales of adapters that a field holds, as [{"id": 0, "scale": 0.5}]; None where it is absent.

    An adapter without an entry has the scale 0.

    Raises:
        ApiError: The field is no such list, or the model has no adapter of an id.
    """
    given, n = fields.take(name), len(engine.card.adapters)
    if given is None:
        return None
    scales: list[Any] = [0.0] * n
    for entry in given if isinstance(given, list) else [given]:
        if not isinstance(entry, dict) or entry.keys() != {"id", "scale"} or isinstance(entry["scale"], bool | str):
            raise fields.refusal(name, 'must be a list such as [{"id": 0, "scale": 0.5}]')
        number = entry["id"]
        if type(number) is not int or not 0 <= number < n:
            known = f"ids from 0 to {n - 1}" if n else "no adapters (edgedec serve --lora FILE loads them)"
            raise fields.refusal(name, f"has the id {number!r:.40}; the model has {known}")
        scales[number] = entry["scale"]
    try:
        return adapter_scales(scales, n)
    except RequestError as error:
        raise fields.refusal(name, "has a scale that is no finite number") from error


def adapter_documents(engine: Engine) -> list[dict[str, Any]]:
    """Return llama-server's description of a model's adapters; the paths are without their folders."""
    pairs = zip(engine.card.adapters, engine.lora, strict=True)
    return [{"id": number, "path": Path(path).name, "scale": scale} for number, (path, scale) in enumerate(pairs)]


def prompt_progress(reading: Reading) -> dict[str, Any]:
    """Return llama-server's field on how far a prompt is read, and our own one on how long the rest will take."""
    counts = {"total": reading.n_prompt, "cache": reading.n_reused, "processed": reading.n_read}
    left = {} if reading.left_s is None else {"edgedec": {"prompt_left_ms": round(1000 * reading.left_s)}}
    return {"prompt_progress": counts | {"time_ms": round(1000 * reading.seconds)}} | left
