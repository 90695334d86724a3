"""edgedec info: what a model file says about itself, by its header, and what it takes; see plan.py.

What not every model needs is imported where it is used: what is imported counts in the memory.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgedec.api.base_memory import base_bytes
from edgedec.api.options import EngineOptions
from edgedec.api.wishes import choose, engine_wishes
from edgedec.errors import EdgedecError, ModelFormatError, OfflineError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.formats import header_path, is_onnx
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.planner import Cap, plan_wishes
from edgedec.memory.system import available_bytes
from edgedec.memory_plan import format_bytes
from edgedec.model import default_n_ctx
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec_apps.cli.opening import application_of, engine_options
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.progress import shown_at_a_terminal
from edgedec_apps.cli.runtimes import ask_runtimes
from edgedec_apps.cli.terminal import write_facts, write_json

_CONTEXTS = (512, 2048, 4096, 8192, 32768)
_ALWAYS_SHOWN = ("temperature", "top_p")


def print_info(model: str, *, as_json: bool) -> None:
    """Print what the file says; a catalogue model that is not on this machine is described by the catalogue."""
    cap = Cap(None, base_bytes(), whole_process=True)  # measured before anything else, as for `edgedec plan`
    try:
        path = resolve(model, ResolveOptions(offline=True))
    except OfflineError:
        entry = _catalogue_entry(model)
        write_json(entry) if as_json else write_facts(_catalogue_facts(entry))
        return
    with shown_at_a_terminal("reading the header, planning the memory"):
        document = _document(path, cap) | _of_export(path)
    write_json(document) if as_json else write_facts(_facts(document))


def _catalogue_entry(name: str) -> dict[str, Any]:
    from edgedec_models.catalogue import load_catalogue

    entry = load_catalogue().get(name)
    if entry is None:
        raise OfflineError(f"{name} is not on this machine; fetch it with: edgedec pull {name}")
    return {
        "name": entry.name,
        "path": None,
        "architecture": entry.architecture,
        "size_bytes": entry.size_bytes,
        "license": entry.licence,
        "note": entry.note,
        "drafters": list(entry.drafters),
    }


def _catalogue_facts(entry: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("name", entry["name"]),
        ("file", f"not on this machine; edgedec pull {entry['name']}"),
        ("architecture", entry["architecture"]),
        ("size", format_bytes(entry["size_bytes"])),
        ("license", entry["license"]),
        ("note", entry["note"]),
        ("drafters", ", ".join(entry["drafters"]) or "none recommended"),
    ]


def _of_export(path: Path) -> dict[str, Any]:
    """Return what an export's folder says otherwise than the header it carries, which has no tensors."""
    if not is_onnx(path):
        return {}
    from edgedec_export.folder import read_manifest

    folder = header_path(path).parent
    try:
        facts = read_manifest(folder) or {}
        n_bytes = sum(int(file["bytes"]) for file in facts["files"].values())
        label = f"ONNX export for {facts['target']}, {facts['quant']}, KV cache {facts['kv']}"
        return {"size_bytes": n_bytes, "n_params": None, "quantization": label}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFormatError(f"{folder}: its edgedec.json can't be read ({error}); export the model again") from error


def _document(path: Path, cap: Cap) -> dict[str, Any]:
    gguf = read_gguf(header_path(path))
    found, choice = describe(gguf), _chosen(path)
    return {
        "name": found.name,
        "path": str(path),
        "architecture": found.architecture,
        "n_params": found.n_params,
        "size_bytes": found.n_bytes,
        "quantization": found.quantization_label,
        "tensors": [
            {"type": share.type.name, "n_tensors": share.n_tensors, "n_bytes": share.n_bytes, "share": share.share}
            for share in found.quantization
        ],
        "n_layer": found.n_layer,
        "n_embd": found.n_embd,
        "n_vocab": found.n_vocab,
        "n_ctx_train": found.n_ctx_train,
        "n_ctx_default": default_n_ctx(found.n_ctx_train or 0),
        **_memory(choice, _contexts(found), cap),
        "sampling_defaults": asdict(SamplingParams(**found.sampling_defaults)),
        "sampling_defaults_from": "the model file" if found.sampling_defaults else "edgedec",
        "has_chat_template": found.has_chat_template,
        "license": found.license,
        "runtimes": {name: _without_path(reason, gguf) for name, reason in _runtimes(path).items()},
        "runtime_chosen": None if choice is None else choice.runtime.name,
        "runtime_reason": "" if choice is None else choice.reason,
    }


def _memory(choice: Choice | None, contexts: list[int], cap: Cap) -> dict[str, Any]:
    """Return the memory that `edgedec plan` plans for the model, by context; nothing where no runtime takes it."""
    if choice is None:
        return {"memory_bytes": {}, "memory_start_bytes": None}
    plans = {}
    for n in contexts:
        options = engine_options(flags := LoadFlags(context=n))
        wishes = engine_wishes(choice, options, application_of(flags, None, one_request=True), available_bytes())
        plans[str(n)] = plan_wishes(choice, wishes.setting, cap).plan
    most = {n: plan.total_bytes for n, plan in plans.items()}
    return {"memory_bytes": most, "memory_start_bytes": min(plan.start_bytes for plan in plans.values())}


def _contexts(found: ModelInfo) -> list[int]:
    trained = found.n_ctx_train or 4096
    return sorted({n for n in _CONTEXTS if n <= trained} | {default_n_ctx(trained)})


def _runtimes(path: Path) -> dict[str, str | None]:
    """Return for each runtime why it does not take the file; None where it does."""
    verdicts = ask_runtimes(lambda runtime: runtime.accepts(path))
    return {name: None if verdict is None else str(verdict) for name, verdict in verdicts.items()}


def _without_path(reason: str | None, gguf: GGUF) -> str | None:
    """Return a refusal without the file's name at its start."""
    return None if reason is None else reason.removeprefix(f"{gguf.paths[0]}: ")


def _chosen(path: Path) -> Choice | None:
    """Return what auto takes by default, with what it knows of the two best runtimes' speed; None where none does."""
    try:
        return choose(path, "auto", EngineOptions().load_options(available_bytes()), measure=False)
    except EdgedecError:
        return None


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the document as lines for a person."""
    trained = document["n_ctx_train"]
    rows = [
        ("name", document["name"] or "-"),
        ("file", document["path"]),
        ("architecture", _shape(document)),
        ("size", _size(document)),
        ("quantization", ": ".join(filter(None, (document["quantization"], _mix(document["tensors"]))))),
        (
            "context",
            f"{document['n_ctx_default']} tokens by default, trained for {'unknown' if trained is None else trained}",
        ),
        ("memory", _held(document)),
        ("sampling", f"{_sampling(document['sampling_defaults'])} (from {document['sampling_defaults_from']})"),
        ("chat template", "yes" if document["has_chat_template"] else "none: it continues text"),
        ("license", document["license"] or "-"),
    ]
    for name, reason in document["runtimes"].items():
        why = f"; {document['runtime_reason']}" if document["runtime_reason"] else ""
        chosen = f" (chosen by auto{why})" if name == document["runtime_chosen"] else ""
        rows.append((f"on {name}", f"yes{chosen}" if reason is None else f"no: {reason}"))
    return rows


def _held(document: dict[str, Any]) -> str:
    """Return what is held, with a short text and where a context is full."""
    if not document["memory_bytes"]:
        return "unknown: no installed runtime takes it"
    full = ", ".join(f"{n}: {format_bytes(size)}" for n, size in document["memory_bytes"].items())
    start = format_bytes(document["memory_start_bytes"])
    return f"{start} with a short text; by tokens of context, where it is full: {full} (edgedec plan has the terms)"


def _size(document: dict[str, Any]) -> str:
    n_bytes = format_bytes(document["size_bytes"])
    return n_bytes if document["n_params"] is None else f"{n_bytes}, {_count(document['n_params'])} parameters"


def _shape(document: dict[str, Any]) -> str:
    layers, width, vocabulary = (document[key] for key in ("n_layer", "n_embd", "n_vocab"))
    return f"{document['architecture']}, {layers} layers of {width}, vocabulary {vocabulary}"


def _mix(tensors: list[dict[str, Any]]) -> str:
    """Return the share of each tensor type by bytes.

    >>> _mix([{"type": "Q4_K", "share": 0.7}, {"type": "F32", "share": 0.0001}])
    'Q4_K 70 %, F32 <1 %'
    """
    return ", ".join(f"{t['type']} {'<1' if t['share'] < 0.01 else round(t['share'] * 100)} %" for t in tensors)


def _sampling(params: dict[str, Any]) -> str:
    off = asdict(SamplingParams())
    shown = [name for name in params if name in _ALWAYS_SHOWN or params[name] != off[name]]
    return ", ".join(f"{name} {params[name]}" for name in shown)


def _count(n: int) -> str:
    """Return a count for people.

    >>> _count(134_515_008), _count(1_543_714_304), _count(107_328)
    ('134.5 million', '1.54 billion', '107328')
    """
    if n < 10**6:
        return str(n)
    return f"{n / 1e9:.2f} billion" if n >= 10**9 else f"{n / 1e6:.1f} million"
