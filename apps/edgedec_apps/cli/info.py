"""edgedec info: what a model file says about itself; reads only its header."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgedec import plugins
from edgedec.errors import EdgedecError, OfflineError, PluginError
from edgedec.gguf import read_gguf
from edgedec.loading import choose_runtime, resolve
from edgedec.memory import format_bytes
from edgedec.model import default_n_ctx
from edgedec.model_info import ModelInfo, describe, kv_cache_bytes
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec_apps.cli.terminal import neutral
from edgedec_models.catalogue import load_catalogue

_SHOWN_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def print_info(model: str, *, as_json: bool) -> None:
    """Print what the file says; a catalogue model that is not on this machine is described by the catalogue."""
    try:
        path = resolve(model, ResolveOptions(offline=True))
    except OfflineError:
        _print(_catalogue_entry(model), as_json)
        return
    _print(_document(path), as_json)


def _catalogue_entry(name: str) -> dict[str, Any]:
    entry = load_catalogue().get(name)
    if entry is None:
        raise OfflineError(f"{name} is not on this machine; fetch it with: edgedec pull {name}")
    return {
        "name": entry.name,
        "size": format_bytes(entry.size_bytes),
        "architecture": entry.architecture,
        "license": entry.licence,
        "note": entry.note,
        "recommended drafters": list(entry.drafters),
        "state": f"not on this machine; edgedec pull {name}",
    }


def _document(path: Path) -> dict[str, Any]:
    gguf = read_gguf(path)
    found = describe(gguf)
    return {
        "path": str(path),
        "name": found.name,
        "architecture": found.architecture,
        "parameters": found.n_params,
        "size": format_bytes(found.n_bytes),
        "quantization": found.quantization_label,
        "tensors": {
            share.type.name: f"{share.n_tensors} tensors, {format_bytes(share.n_bytes)}, {share.share:.0%}"
            for share in found.quantization
        },
        "layers": found.n_layer,
        "width": found.n_embd,
        "vocabulary": found.n_vocab,
        "context trained": found.n_ctx_train,
        "context default": default_n_ctx(found.n_ctx_train or 0),
        "weights and KV cache": _memory(found),
        "sampling defaults": _sampling(found),
        "chat template": "yes" if found.has_chat_template else "no",
        "license": found.license,
        "runtimes": _runtimes(path),
    }


def _memory(found: ModelInfo) -> dict[str, str]:
    """Return the size of the weights and an f16 KV cache at several contexts, as text."""
    trained = found.n_ctx_train or 4096
    contexts = sorted({n for n in (512, 2048, 4096, 8192, 32768) if n <= trained} | {default_n_ctx(trained)})
    return {f"{n} tokens": format_bytes(found.n_bytes + kv_cache_bytes(found, n)) for n in contexts}


def _sampling(found: ModelInfo) -> dict[str, Any]:
    params = asdict(SamplingParams(**found.sampling_defaults))
    source = "the model file" if found.sampling_defaults else "edgedec"
    return {name: params[name] for name in _SHOWN_SAMPLING} | {"from": source}


def _runtimes(path: Path) -> dict[str, str]:
    """Return for each runtime whether it takes the file, and what "auto" chooses."""
    verdicts: dict[str, str] = {}
    for name, plugin in plugins.plugins(plugins.RUNTIMES).items():
        try:
            loaded = plugin.load()
            runtime = loaded() if isinstance(loaded, type) else loaded
            verdicts[name] = runtime.accepts(path) or "yes"
        except PluginError as error:
            verdicts[name] = str(error)
    try:
        chosen = choose_runtime(path, "auto").runtime.name
    except EdgedecError:
        return verdicts
    return verdicts | {"auto": chosen}


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, ensure_ascii=False))
        return
    for name, value in document.items():
        if isinstance(value, dict):
            print(f"{name}:")
            width = max((len(str(key)) for key in value), default=0)
            for key, inner in value.items():
                print(neutral(f"  {key:{width}}  {inner}"))
        else:
            shown = ", ".join(value) if isinstance(value, list) else value
            print(neutral(f"{name + ':':22} {'-' if shown is None else shown}"))
