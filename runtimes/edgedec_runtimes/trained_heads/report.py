"""What `edgedec info` says of a trained head: its card, as JSON and for a person."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec_runtimes.trained_heads.load import load_head


def head_document(path: Path) -> dict[str, Any]:
    """Return the JSON object of a head.

    Raises:
        ModelError, StorageError: The head can't be read, or is none that edgedec runs.
    """
    head = load_head(path)
    tensors: dict[str, dict[str, Any]] = {}
    for name, stored in head.tensors.items():
        tensors[name] = {"shape": list(stored.shape), "type": stored.type.name, "n_bytes": stored.data.nbytes}
    for tensor in head.of_layers:
        name = tensor.name.removesuffix(".weight")
        tensors[name] = {"shape": list(tensor.shape[::-1]), "type": tensor.type.name, "n_bytes": tensor.n_bytes}
    n_params = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    return {"kind": "draft head", "path": str(path), "n_params": n_params, "size_bytes": head.n_bytes} | (
        asdict(head.card) | {"tensors": tensors}
    )


def head_facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the document of a head as names and values for a person."""
    target, promise, block, made = (document[name] for name in ("target", "promise", "block", "rows"))
    drafted, n_target = document["n_vocab_draft"], document["n_vocab_target"]
    rows = [
        ("name", document["name"]),
        ("file", document["path"]),
        ("kind", f"a trained draft head ({_form(document)}): it serves one model, and is no model itself"),
        ("trained for", "unknown: the file does not say" if target is None else _target(target)),
        ("size", f"{format_bytes(document['size_bytes'])}, {document['n_params'] / 1e6:.1f} million parameters"),
        ("types", _types(document["tensors"])),
        *(_made_rows(made) if made else _own_layers(document, block)),
        ("vocabulary", f"drafts {drafted} of {n_target} tokens"),
        ("matrices", _matrices(document)),
        ("accepts", "unknown: the file does not say" if promise is None else _reach(promise["reach"])),
    ]
    for kind, reach in (promise or {"reach_by_kind": {}})["reach_by_kind"].items():
        rows.append((f"accepts, {kind}", _reach(reach)))
    rows += [("note", note) for note in document["notes"]]
    return rows


def _form(document: dict[str, Any]) -> str:
    block, made = document["block"], document["rows"]
    if made is not None:
        return "hidden transfer" if made["layer"] else "prompt tokens"
    if document["exits"]:
        return "early exit"
    if block is None:
        return "assistant" if document["reads_target"] else "nextn" if document["joins"] else "EAGLE-3"
    if block["markov"] == "selector" or block["conv_length"]:
        return "DFlash2"
    return "DFlash" if block["markov"] == "none" else "DSpark"


def _made_rows(made: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what rows a row head has."""
    return [("rows", f"{made['n']} behind a token's, which enter the model's layer {made['layer']}, counted from 0")]


def _own_layers(document: dict[str, Any], block: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return what a head's own layers are, and what they read."""
    of_block = [] if block is None else _block(block)
    return [("layer" if block is None else "layers", _layers(document)), *of_block, ("taps", _taps(document))]


def _layers(document: dict[str, Any]) -> str:
    """Return the sizes of the layers: how many, where a block head may have several."""
    n_layer = f"{document['block']['n_layer']} of " if document["block"] else ""
    return f"{n_layer}width {document['n_embd']}, {document['n_head']} heads of {document['head_dim']}"


def _block(block: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a block head has beside its layers."""
    first = "the newest token" if block["shifted"] else "the newest token, which drafts nothing,"
    n_masks = block["size"] - 1
    sight = "the rows before it" if block["causal"] else "all of them"
    markov = {
        "none": "no",
        "vanilla": f"by the token before, of rank {block['rank']}",
        "gated": f"by the token before and the row, of rank {block['rank']}",
        "rnn": f"by all tokens before, of rank {block['rank']}",
        "selector": f"by the token before, among the {block['top_k']} best tokens of a row, of rank {block['rank']}",
    }[block["markov"]]
    length, group = block["conv_length"], block["conv_group"]
    convolutions = [("convolutions", f"over {length} rows, with kernels for {group} neighbours")] if length else []
    return [
        ("block", f"{block['size']} rows, {first} and {n_masks} masks; a row sees {sight}"),
        *convolutions,
        ("Markov head", markov),
        ("confidence", "says how likely each token is accepted" if block["confidence"] else "none"),
    ]


def _target(target: dict[str, str]) -> str:
    hashed = target["weights_hash"]
    return f"{target['name'] or 'a model without a name'}{f' (weights {hashed[:8]})' if hashed else ''}"


def _taps(document: dict[str, Any]) -> str:
    if document["reads_target"]:
        return "the target's keys and values, and what leaves its last norm"
    if document["joins"]:
        return f"what leaves layer {document['taps'][0]} of {document['taps'][0]}, after the model's last norm"
    if not document["taps"]:
        return "the layers that EAGLE-3's code taps in a model of the target's depth"
    return f"what enters layers {', '.join(map(str, document['taps']))}, counted from 0"


def _matrices(document: dict[str, Any]) -> str:
    matrices = [name for name in ("embedding", "output") if document[f"own_{name}"]]
    borrowed = [name for name in ("embedding", "output") if name not in matrices]
    parts = [f"its own {' and '.join(matrices)}"] if matrices else []
    return "; ".join([*parts, *([f"the model's {' and '.join(borrowed)}"] if borrowed else [])])


def _types(tensors: dict[str, dict[str, Any]]) -> str:
    """Return the types of the matrices, each with the names of those that have it, whatever their layer.

    >>> _types({"fc": {"shape": [2, 4], "type": "Q8_0"}, "q": {"shape": [2, 4], "type": "Q4_0"}})
    'Q8_0 fc; Q4_0 q'
    """
    by_type: dict[str, dict[str, None]] = {}
    for name, tensor in tensors.items():
        if len(tensor["shape"]) == 2:
            by_type.setdefault(tensor["type"], {})[name.rpartition(".")[2]] = None
    return "; ".join(f"{kind} {' '.join(names)}" for kind, names in by_type.items())


def _reach(reach: Iterable[float]) -> str:
    """Return chances by depth in words.

    >>> _reach([0.56, 0.28])
    'the first token of a draft 56 %, up to the second 28 %'
    """
    ordinals = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    first, *rest = (f"{round(100 * chance)} %" for chance in reach)
    more = [f"up to the {word} {chance}" for word, chance in zip(ordinals, rest, strict=False)]
    return ", ".join([f"the first token of a draft {first}", *more])
