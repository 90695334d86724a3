"""Folders with the graphs of an encoder and a decoder, as optimum exports T5 and Marian, read as a GGUF's header is.

    folder/config.json, generation_config.json, tokenizer.json
    folder/encoder_model.onnx, decoder_model_merged.onnx        or, in place of the second one:
    folder/decoder_model.onnx, decoder_with_past_model.onnx     the decoder's first token, and those that follow

The graphs may lie in the folder `onnx` of that folder. Those whose weights are not float32 have an ending, as in
encoder_model_quantized.onnx: the path of one of them stands for the model of that ending. The tokenizer must be
SentencePiece's unigram model; a rule that the one of a GGUF does not have is refused by name, never approximated.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.values import GGUFArray, Value, ValueType

_NAMES = ("encoder_model", "decoder_model_merged", "decoder_model", "decoder_with_past_model")
_GRAPH = re.compile(rf"(?:{'|'.join(_NAMES)})(_\w+)?\.onnx")
_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
_MOST_BYTES, _LARGEST = 1 << 27, 1 << 20
_AGAIN = "export the model again with optimum, for the task text2text-generation-with-past"
_OTHER = "take a GGUF of the model, or another model"
_SIZES = {  # keys of a GGUF and what config.json calls them; where it has no such size, the next one counts
    "t5": "block_count=num_decoder_layers|num_layers context_length=n_positions|512 embedding_length=d_model "
    "feed_forward_length=d_ff attention.head_count=num_heads attention.key_length=d_kv vocab_size=vocab_size",
    "marian": "block_count=decoder_layers context_length=max_position_embeddings embedding_length=d_model "
    "feed_forward_length=decoder_ffn_dim attention.head_count=decoder_attention_heads vocab_size=vocab_size",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # llama.cpp's types of tokens
_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)
_SPACE = "\u2581"


def graphs_of(path: Path) -> tuple[Path, ...]:
    """Return the graphs of an encoder and a decoder, the encoder first, be they there or not; () for what is no such.

    Args:
        path: Their folder, for graphs without an ending; or a graph, for those with its ending.
    """
    match = _GRAPH.fullmatch(path.name) if path.is_file() else None
    folders, ending = (path, path / "onnx"), match[1] or "" if match else ""
    place = path.parent if match else next((folder for folder in folders if _graphs_in(folder)), None)
    if place is None:
        return ()
    encoder, merged, first, later = (place / f"{name}{ending}.onnx" for name in _NAMES)
    return (encoder, merged) if merged.is_file() else (encoder, first, later)


def _graphs_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.onnx") if _GRAPH.fullmatch(file.name))


def weights_of(graphs: Sequence[Path]) -> str:
    """Return how graphs of graphs_of() hold their weights, by their ending; "float32" where they have none."""
    return graphs[0].stem.removeprefix(_NAMES[0]).removeprefix("_") or "float32"


def texts_of(path: Path) -> Path:
    """Return the folder of config.json and tokenizer.json for a path of graphs_of()."""
    folder = path.parent if path.is_file() else path
    return folder if folder.name != "onnx" or (folder / _CONFIG).is_file() else folder.parent


def read_two_graphs(path: Path) -> tuple[dict[str, Value], str]:
    """Return what a GGUF of such a model would say, and the SHA-256 (hex) of the texts that say it.

    Args:
        path: As in graphs_of().

    Raises:
        ModelNotFoundError, ModelFormatError: A file is missing, or damaged.
        UnsupportedModelError: The model or its tokenizer is of another kind.
        OSError: A file can't be read.
    """
    graphs, folder = graphs_of(path), texts_of(path)
    for needed in (*graphs, folder / _CONFIG, folder / _TOKENIZER):
        if not needed.is_file():
            others = ", ".join(each.name for each in _graphs_in(needed.parent) if each not in graphs)[:400]
            instead = f"give the path of one of {others}, or " if others and needed in graphs else ""
            raise ModelNotFoundError(
                f"{path}: an encoder or a decoder is there, but no {needed.name}; {instead}{_AGAIN}"
            )
    digest, texts = hashlib.sha256(), list[dict[str, Any]]()
    for path in (folder / name for name in (_CONFIG, _GENERATION, _TOKENIZER)):
        if path.is_file():
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES)
        else:
            raw = b"{}"
        digest.update(raw)
        try:
            texts.append(dict(json.loads(raw)))
        except _DAMAGED as error:
            raise ModelFormatError(f"{path}: it is no JSON object ({error}); {_AGAIN}") from error
    kind = str(texts[0].get("model_type"))[:40]
    sizes, eos, metadata = _sizes(folder, kind, texts[0] | texts[1])
    metadata |= {f"{kind}.{key}": size for key, size in sizes.items()} | {"general.architecture": kind}
    return metadata | _pieces(folder / _TOKENIZER, texts[2], sizes["vocab_size"], eos), digest.hexdigest()


def _sizes(folder: Path, kind: str, config: dict[str, Any]) -> tuple[dict[str, int], int, dict[str, Value]]:
    """Return the sizes, the token that ends a text, and which tokens begin a text or may not be in it."""
    if kind not in _SIZES or config.get("forced_bos_token_id") is not None:
        raise UnsupportedModelError(
            f"{folder}: an encoder and a decoder of the kind {kind!r}, expected {' or '.join(map(repr, _SIZES))} "
            "without forced_bos_token_id; take another model"
        )
    try:
        names = dict(pair.split("=") for pair in _SIZES[kind].split())
        of_key = {key: [int(n) if n.isdecimal() else config.get(n) for n in names[key].split("|")] for key in names}
        sizes = {key: next(value for value in values if value is not None) for key, values in of_key.items()}
        banned = [word[0] for word in config.get("bad_words_ids") or () if len(word) == 1]
        eos = config["eos_token_id"]
        tokens = [config["decoder_start_token_id"], eos[0] if isinstance(eos, list) else eos, *banned]
        range_of_all = (*((n, 1, _LARGEST) for n in sizes.values()), *((t, 0, sizes["vocab_size"] - 1) for t in tokens))
        wrong = [n for n, least, most in range_of_all if type(n) is not int or not least <= n <= most]
    except (*_DAMAGED, StopIteration) as error:
        wrong = [f"{type(error).__name__} {error}"]
    if wrong:
        raise ModelFormatError(f"{folder}: a size or a token of {_CONFIG} is {str(wrong[0])[:40]}; {_AGAIN}")
    metadata: dict[str, Value] = {f"{kind}.decoder_start_token_id": tokens[0]}
    if banned:
        metadata["tokenizer.ggml.suppress_tokens"] = _array(ValueType.INT32, np.array(banned, "<i4"))
    return sizes, tokens[1], metadata if config.get("do_sample") else metadata | {"general.sampling.temp": 0.0}


def _array(kind: ValueType, numbers: "np.ndarray[Any, Any]") -> GGUFArray:
    return GGUFArray(kind, len(numbers), numbers.tobytes())


def _pieces(path: Path, document: dict[str, Any], n_vocab: int, eos: int) -> dict[str, Value]:
    """Return the metadata of tokenizer.json; tokens that it doesn't name fill the vocabulary up to `n_vocab`."""
    kinds, scores = np.full(n_vocab, _UNUSED, "<i4"), np.zeros(n_vocab, "<f4")
    texts = [f"[PAD{i}]" for i in range(n_vocab)]
    try:
        model = document["model"]
        if model.get("type") != "Unigram" or model.get("byte_fallback"):
            kind = str(model.get("type"))[:40]
            raise UnsupportedModelError(f"{path}: its model is {kind!r}, expected 'Unigram' without bytes; {_OTHER}")
        for i, (text, score) in enumerate(model["vocab"]):
            is_language = text[:2] == ">>" and text[-2:] == "<<"  # which Marian cuts out of texts
            texts[i], scores[i], kinds[i] = text, score, _USER_DEFINED if is_language else _NORMAL
        for token in document.get("added_tokens") or ():
            i = range(n_vocab).index(token["id"])
            texts[i], kinds[i] = token["content"], _CONTROL if token["special"] else _USER_DEFINED
        unknown = texts.index("<unk>") if "<unk>" in texts else range(n_vocab).index(model["unk_id"])
        strings, kinds[unknown] = [text.encode() for text in texts], _UNKNOWN
        table, ends = _rules(path, document, texts[eos])
        replaced = base64.b64decode(table, validate=True) if table else _white_space()
    except _DAMAGED as error:
        raise ModelFormatError(
            f"{path}: damaged, or of over {n_vocab} tokens as in {_CONFIG} ({error!r:.60}); {_AGAIN}"
        ) from error
    data = b"".join(len(raw).to_bytes(8, "little") + raw for raw in strings)
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": GGUFArray(ValueType.STRING, n_vocab, data),
        "tokenizer.ggml.scores": _array(ValueType.FLOAT32, scores),
        "tokenizer.ggml.token_type": _array(ValueType.INT32, kinds),
        "tokenizer.ggml.precompiled_charsmap": GGUFArray(ValueType.UINT8, len(replaced), replaced),
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.add_eos_token": ends,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def _rules(path: Path, document: dict[str, Any], eos: str) -> tuple[str | None, bool]:
    """Return the table of replaced characters, and whether each text ends with `eos`; refuse all other rules."""
    table, ends = None, False
    for key, parts in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("post_processor", "processors"),
    ):
        entry = document.get(key) or {"type": "Sequence", parts: []}
        for step in entry[parts] if entry["type"] == "Sequence" else [entry]:
            kind, special = step["type"], [part.get("SpecialToken", {}).get("id") for part in step.get("single") or ()]
            first = step.get("prepend_scheme") != "never" and step.get("add_prefix_space", True)
            if kind == "Precompiled":
                table = step["precompiled_charsmap"]
            elif kind == "TemplateProcessing" and special == [None, eos]:
                ends = True
            elif not (
                kind in ("Strip", "WhitespaceSplit")
                or (kind == "Replace" and step["pattern"] == {"Regex": " {2,}"} and step["content"] in (" ", _SPACE))
                or (kind == "Metaspace" and step["replacement"] == _SPACE and first)
            ):
                raise UnsupportedModelError(f"{path}: its {key} has the step {str(step)[:80]}; {_OTHER}")
    return table, ends


def _white_space() -> bytes:
    """Return a table that only turns white space into spaces, for files without one: see tokenizer/unigram.py."""
    nodes = np.zeros(512, "<u4")
    nodes[0], nodes[1] = 256 << 10, 1 << 31  # bytes lead to the nodes from 256 on, these to node 1, the first text
    for byte in b"\t\n\v\f\r":
        nodes[256 + byte] = ((256 + byte) ^ 1) << 10 | 0x100 | byte
    return nodes.nbytes.to_bytes(4, "little") + nodes.tobytes() + b" \0"
