"""edgedec info: what a model's file says, and what the model needs here, for a person or as JSON."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgedec.errors import EdgedecError, ModelNotFoundError, OfflineError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.options import AsJson, ModelName
from edgedec_apps.cli.reports.expectations import Expectation, head_line, of_entry
from edgedec_apps.cli.shown.progress import shown_at_a_terminal
from edgedec_apps.cli.shown.terminal import write_facts, write_json

if TYPE_CHECKING:
    from edgedec.memory.setting import Cap
    from edgedec_models.catalogue import Entry

Facts = list[tuple[str, str]]

_WITHOUT = " (tokens a second without drafts)"
_ALWAYS_SHOWN = ("temperature", "top_p")


def command(model: ModelName, *, as_json: AsJson = False) -> None:
    """Show a model's architecture, quantization, context, memory, runtimes; or a head's or projector's card.

    Only the file's header is read (of a draft head, all), and downloaded where the model is not on this machine.
    """
    from edgedec.head_kinds import kind_of
    from edgedec.memory.setting import Cap
    from edgedec_apps.base_memory import base_bytes
    from edgedec_apps.cli.commands.list import entry_document
    from edgedec_apps.cli.reports.model_report import model_document
    from edgedec_apps.machine_speed import memory_bandwidth
    from edgedec_models.catalogue import find_model

    cap = Cap(None, base_bytes(), whole_process=True)  # before the file is read, as where memory is planned
    try:
        path = _stored(model)
    except OfflineError:
        entry = find_model(model)
        if entry is None:
            document = _distant_document(model, cap)
            write_json(document) if as_json else write_facts(_facts(document))
            return
        bandwidth = memory_bandwidth()
        expected, further = of_entry(entry, bandwidth), {"path": None, "drafters": list(entry.drafters)}
        if as_json:
            write_json(entry_document(entry, expected) | further)
        else:
            write_facts(_catalogue_facts(entry, expected, bandwidth))
        return
    if (facts := _projector_facts(path)) is not None:
        write_json(dict(facts)) if as_json else write_facts(facts)
        return
    if (kind := kind_of(path)) is not None:
        head = kind.describe(path)
        write_json(head.document) if as_json else write_facts(list(head.rows))
        return
    with shown_at_a_terminal("reading the header, planning the memory"):
        document = model_document(path, cap) | {"draft_head": _head_of(path)} | _known_of(path)
    write_json(document) if as_json else write_facts(_facts(document))


def _projector_facts(path: Path) -> Facts | None:
    """Return the facts of a picture encoder; None for another file (ModelError where it is damaged)."""
    from edgedec.gguf.file import read_header_of
    from edgedec_runtimes.pictures.header import is_projector, read_projector

    try:
        gguf = read_header_of(path)
    except EdgedecError:
        return None
    if not is_projector(gguf):
        return None
    header = read_projector(path)
    return [
        ("name", header.name),
        ("kind", header.description),
        ("layers", f"{header.n_layers}, of {header.embedding_length} numbers"),
        ("picture size", f"{header.image_size} pixels, in patches of {header.patch_size}"),
        ("file", f"{standing(path)}, {format_bytes(standing(path).stat().st_size)}"),
        ("used by", "the model that it lies beside, or that names it (--method pictures)"),
    ]


def _stored(model: str) -> Path:
    """Return the file of a model, or of a draft head, on this machine; raises what `resolve` raises for a model."""
    from edgedec.loading.resolve import resolve

    try:
        return resolve(model, ResolveOptions(offline=True))
    except OfflineError:
        with suppress(OfflineError, ModelNotFoundError):
            return resolve(model, ResolveOptions(offline=True, draft_head=True))
        raise


def _distant_document(model: str, cap: "Cap") -> dict[str, Any]:
    """Return the JSON object of a model that is not on this machine, by its header.

    Raises:
        OfflineError: What is at the address may be a draft head, of which all is read.
        EdgedecError: As model_or_stand_in.
    """
    from edgedec_apps.cli.reports.model_report import model_document
    from edgedec_models.stand_in import model_or_stand_in

    with TemporaryDirectory(prefix="edgedec-") as folder, shown_at_a_terminal("reading the header"):
        try:
            path = model_or_stand_in(model, ResolveOptions(), Path(folder))
        except ModelNotFoundError as error:
            raise OfflineError(f"{model} is not on this machine; download it with: edgedec pull {model}") from error
        return model_document(path, cap) | {"name": model, "path": None, "draft_head": None, "tokens_per_s": None}


def _known_of(path: Path) -> dict[str, Any]:
    """Return what is known of a model on this machine beside its file: its speed, and what the catalogue says of it."""
    from edgedec_apps.machine_speed import kept_speed
    from edgedec_models.cache import entry_of

    entry, facts = entry_of(path), {"tokens_per_s": kept_speed(path)}
    if entry is None:
        return facts
    counted = {} if entry.n_params is None else {"n_params": entry.n_params}
    return facts | counted | {"name": entry.name, "note": entry.note, "license": entry.licence}


def _head_of(path: Path) -> str | None:
    """Return the path of the draft head that a model is used with by itself, where it has one."""
    from edgedec.head_kinds import find_head
    from edgedec.plugins import HEAD_KINDS, plugins
    from edgedec.storage.cache_files import cache_folder

    head = find_head(path, plugins(HEAD_KINDS), cache_folder())
    return None if head is None else str(head)


def _use(document: dict[str, Any]) -> Facts:
    """Return what a model is for: ranking, vectors, or texts with these defaults of sampling."""
    if document["ranks"]:
        return [("made for", "ranking documents by a query (edgedec rank)")]
    if document["embeds"]:
        return [("made for", "vectors of texts (edgedec embed)")]
    return [
        ("sampling", f"{_sampling(document['sampling_defaults'])} (from {document['sampling_defaults_from']})"),
        ("chat template", "yes" if document["has_chat_template"] else "none: the model continues text"),
        ("draft head", _head(document)),
    ]


def _head(document: dict[str, Any]) -> str:
    """Return where a model's draft head is, for a person."""
    head: str | None = document["draft_head"]
    return "a nextn layer in the model's file" if head and head == document["path"] else head or "none"


def _catalogue_facts(entry: "Entry", expected: Expectation, bandwidth: float | None) -> Facts:
    of_what = "with 4,096 tokens of context" if entry.chat_bytes else "for the weights alone"
    why = "" if bandwidth is None else f", as memory is read at {bandwidth / 1e9:.1f} GB/s here"
    return [
        ("name", entry.name),
        ("file", f"not on this machine; download it with: edgedec pull {entry.name}"),
        *([("source", entry.reference)] if entry.reference else []),
        ("architecture", entry.architecture),
        ("parameters", _params(entry)),
        ("size", "known when it is pulled" if entry.size_bytes is None else format_bytes(entry.size_bytes)),
        ("memory", f"{expected.memory()}, {of_what}"),
        ("speed", f"{expected.speed()}{_WITHOUT}{why}"),
        ("runtime", expected.runtime or "unknown"),
        ("license", entry.licence),
        ("note", f"{entry.note}{'' if entry.tried else ' (not tried)'}"),
        ("drafters", ", ".join(entry.drafters) or "none recommended"),
        ("draft head", head_line(entry) or "none"),
    ]


def _params(entry: "Entry") -> str:
    if entry.n_params is None:
        return "-"
    active = "" if entry.n_active_params is None else f", of which a token reads {_count(entry.n_active_params)}"
    return f"{_count(entry.n_params)}{active}"


def _facts(document: dict[str, Any]) -> Facts:
    """Return the document of a model as names and values for a person."""
    trained = document["n_ctx_train"]
    rows = [
        ("name", document["name"]),
        *([("note", document["note"])] if "note" in document else []),
        ("file", document["path"] or "not on this machine; download it with: edgedec pull"),
        ("architecture", _shape(document)),
        ("size", _size(document)),
        ("quantization", ": ".join(filter(None, (document["quantization"], _mix(document["tensors"]))))),
        (
            "context",
            f"{document['n_ctx_default']} tokens by default, trained for {'unknown' if trained is None else trained}",
        ),
        ("memory", _memory(document)),
        ("speed", f"{Expectation(None, None, None, None, document['tokens_per_s']).speed()}{_WITHOUT}"),
        *_use(document),
        ("license", document["license"] or "-"),
    ]
    for name, reason in document["runtimes"].items():
        why = f"; {document['runtime_reason']}" if document["runtime_reason"] else ""
        chosen = f" (chosen by auto{why})" if name == document["runtime_chosen"] else ""
        rows.append((f"on {name}", f"yes{chosen}" if reason is None else f"no: {reason}"))
    return rows


def _memory(document: dict[str, Any]) -> str:
    """Return the memory with a short text, and with a full context of several lengths."""
    if not document["memory_bytes"]:
        return "unknown: no installed runtime runs this model"
    full, start = _by_context(document["memory_bytes"]), format_bytes(document["memory_start_bytes"])
    on_devices = [f"; on {name}: {_by_context(sizes)}" for name, sizes in document["memory_on_devices"].items()]
    line = f"{start} with a short text; with a full context: {full}{''.join(on_devices)}"
    return f"{line} (edgedec plan lists the parts)"


def _by_context(sizes: dict[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} for {n} tokens" for n, size in sizes.items())


def _size(document: dict[str, Any]) -> str:
    n_bytes = format_bytes(document["size_bytes"])
    return n_bytes if document["n_params"] is None else f"{n_bytes}, {_count(document['n_params'])} parameters"


def _shape(document: dict[str, Any]) -> str:
    layers, width, vocabulary = (document[key] for key in ("n_layer", "n_embd", "n_vocab"))
    return f"{document['architecture']}, {layers} layers of width {width}, vocabulary of {vocabulary} tokens"


def _mix(tensors: list[dict[str, Any]]) -> str:
    """Return the share of each tensor type in the bytes of the file.

    >>> _mix([{"type": "Q4_K", "share": 0.7}, {"type": "F32", "share": 0.0001}])
    'Q4_K 70 %, F32 <1 %'
    """
    return ", ".join(f"{t['type']} {'<1' if t['share'] < 0.01 else round(t['share'] * 100)} %" for t in tensors)


def _sampling(params: dict[str, Any]) -> str:
    """Return the sampling defaults that differ from "off", and always temperature and top_p."""
    from edgedec.sampling import SamplingParams

    off = asdict(SamplingParams())
    shown = [name for name in params if name in _ALWAYS_SHOWN or params[name] != off[name]]
    words = {"logit_bias": f"of {len(params['logit_bias'])} tokens"}
    return ", ".join(f"{name} {words.get(name, params[name])}" for name in shown)


def _count(n: int) -> str:
    """Return a count with a word for large numbers.

    >>> _count(134_515_008), _count(1_543_714_304), _count(107_328)
    ('134.5 million', '1.54 billion', '107328')
    """
    if n < 10**6:
        return str(n)
    return f"{n / 1e9:.2f} billion" if n >= 10**9 else f"{n / 1e6:.1f} million"
