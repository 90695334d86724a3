"""Models that Ollama has pulled, used where they are: ollama:NAME[:TAG].

A manifest, `manifests/HOST/OWNER/NAME/TAG`, lists layers by digest; the layer of the type MODEL_LAYER is a GGUF file in
`blobs/`.
"""

import json
import os
import re
from pathlib import Path

from edgedec.callers import did_you_mean
from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError, argument
from edgedec_models.storage import storage_errors

MODEL_LAYER = "application/vnd.ollama.image.model"
ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_MOST_BYTES = 1 << 20  # of a manifest; usual ones have less than 2 kB
_HOST = "registry.ollama.ai"
_SERVICE_FOLDER = Path("/usr/share/ollama/.ollama/models")  # where Ollama's own service on Linux keeps them
_SPEC = re.compile(r"ollama:(?P<path>\w[\w.-]*(?:/\w[\w.-]*){0,2})(?::(?P<tag>\w[\w.-]*))?", re.ASCII)


def ollama_folders() -> list[Path]:
    """Return the folders where Ollama may keep models: only OLLAMA_MODELS if it is set, else the usual places."""
    if folder := os.environ.get("OLLAMA_MODELS"):
        return [Path(folder).expanduser()]
    return [Path.home() / ".ollama" / "models", _SERVICE_FOLDER]


def find_ollama(name: str) -> Path:
    """Return the blob with the weights of an Ollama model.

    Raises:
        ModelNotFoundError: The name does not have this form, or Ollama does not have the model.
        ModelFormatError: The manifest names no usable weights.
        UnsupportedModelError: The model is another one with an adapter.
    """
    match = _SPEC.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(f"{name!r} is not the name of an Ollama model: write ollama:NAME or ollama:NAME:TAG")
    parts = match["path"].split("/")
    parts = [*[_HOST, "library"][: 3 - len(parts)], *parts] if len(parts) < 3 else parts
    folders = ollama_folders()
    for folder in folders:
        manifest = folder.joinpath("manifests", *parts, match["tag"] or "latest")
        with storage_errors("look at", manifest):
            is_there = manifest.is_file()
        if is_there:
            return _weights(name, manifest, folder / "blobs")
    names = [name for folder in folders for name in _names(folder)]
    raise ModelNotFoundError(
        f"Ollama has no model {name!r} in {' or '.join(map(str, folders))}{did_you_mean(name, names)}; get it with "
        f"`ollama pull {name.removeprefix('ollama:')}`, or set OLLAMA_MODELS to the folder that has it"
    )


def _weights(name: str, manifest: Path, blobs: Path) -> Path:
    with storage_errors("read", manifest), manifest.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        layers = json.loads(text)["layers"]
        model_layers = [
            (str(layer["digest"]), layer.get("size")) for layer in layers if layer["mediaType"] == MODEL_LAYER
        ]
        adapters = [str(layer["digest"]) for layer in layers if layer["mediaType"] == ADAPTER_LAYER]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFormatError(
            f"{name}: the manifest {manifest} is not one of Ollama's: {error!r}; pull the model again with `ollama "
            "pull`"
        ) from error
    if adapters and model_layers:
        weights, adapter = (str(blobs / digest.replace(":", "-")) for digest in (model_layers[0][0], adapters[0]))
        raise UnsupportedModelError(
            f"{name}: a model with an adapter (ADAPTER), without which its text would be another one: use the file "
            f"{weights!r} with {argument('lora')} {adapter!r}"
        )
    if len(model_layers) != 1:
        raise ModelFormatError(
            f"{name}: the manifest {manifest} names {len(model_layers)} files of weights, expected one; edgedec runs "
            "only models that are one GGUF file"
        )
    digest, size_bytes = model_layers[0]
    if re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        raise ModelFormatError(
            f"{name}: the manifest {manifest} names the digest {digest!r}, expected sha256: and 64 hex digits; pull "
            "the model again"
        )
    path = blobs / digest.replace(":", "-")
    if not path.is_file():
        raise ModelNotFoundError(f"{name}: its weights {path} are missing; pull the model again with `ollama pull`")
    if size_bytes not in (None, path.stat().st_size):
        raise ModelFormatError(
            f"{name}: its weights {path} have {path.stat().st_size} bytes where {size_bytes} were expected; pull the "
            "model again with `ollama pull`"
        )
    return path


def _names(folder: Path) -> list[str]:
    """Return the ollama: names of all models in a folder."""
    root = folder / "manifests"
    names = []
    for path in sorted(root.glob("*/*/*/*")):
        host, owner, model, tag = path.relative_to(root).parts
        shown = [part for part, usual in ((host, _HOST), (owner, "library")) if part != usual]
        names.append("ollama:" + "/".join([*shown, model]) + ("" if tag == "latest" else f":{tag}"))
    return names
