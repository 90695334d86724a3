"""Which model a head was trained for: hashes of a model's file, and whether a head fits it.

A head learned the hidden states of one model. With another quantization of that model it works nearly as well; with
another model of the same sizes it runs, and nothing it drafts is accepted. So a head names its target by three hashes,
which cost some milliseconds:

- weights: of every tensor's name, shape and type, and of samples of its bytes. Files that share it hold the same model
  in the same quantization.
- norms: of the numbers of all vectors, which quantizers leave alone. Quantizations of one model share it.
- tokenizer: of the list of tokens. Models that share it mean the same by a token id.

The vocabulary of an exported folder has no tensors. There two metadata keys hold the hashes of the file that was
exported.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF, ValueType, floats
from edgedec.gguf.metadata import get_array, get_text
from edgedec.gguf.model_info import describe
from edgedec.storage import probe_cache
from edgedec_runtimes.architectures.nextn import without_nextn
from edgedec_runtimes.trained_heads.card import HeadCard, Target
from edgedec_runtimes.trained_heads.gguf_assistant import misfit
from edgedec_runtimes.trained_heads.head import Head

WEIGHTS_KEY, NORMS_KEY = "edgedec.source.weights", "edgedec.source.norms"
"""The metadata keys of an exported folder's vocabulary: `hash_weights` and `hash_norms` of what was exported."""

_KIND = "target"
_SAMPLE_BYTES = 4096
_HASH_CHARACTERS = 32  # of SHA-256's 64: 128 bits


_known: WeakKeyDictionary[GGUF, Target] = WeakKeyDictionary()


def target_of(gguf: GGUF, cache_dir: Path | None = None) -> Target:
    """Return the name and the hashes of a model, for the record of a head that learns from it.

    They are kept for as long as `gguf` is referenced, and in the cache for as long as the files do not change.

    Args:
        gguf: The model.
        cache_dir: The cache's root; None for no cache.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: The file has changed since it was opened, or can't be read.
    """
    if gguf not in _known:
        key = f"{gguf.header_hash} {gguf.states}"
        target = _target(probe_cache.get(cache_dir, _KIND, key))
        if target is None:
            name = gguf.metadata.get("general.name")
            model_name = name if isinstance(name, str) and name else gguf.paths[0].stem
            target = Target(
                model_name,
                hash_weights(gguf) or _recorded(gguf, WEIGHTS_KEY),
                hash_norms(gguf) or _recorded(gguf, NORMS_KEY),
                hash_tokenizer(gguf),
            )
            probe_cache.put(cache_dir, _KIND, key, list(astuple(target)))
        _known[gguf] = target
    return _known[gguf]


def _target(value: Any) -> Target | None:
    """Return the target that the cache kept; None for what is none."""
    if not isinstance(value, list) or len(value) != len(fields(Target)) or not all(isinstance(v, str) for v in value):
        return None
    return Target(*value)


def exported_hashes(gguf: GGUF, rounding: str) -> dict[str, str]:
    """Return the metadata by which an exported folder names its weights: WEIGHTS_KEY and NORMS_KEY.

    Args:
        gguf: The file that is exported.
        rounding: How the export rounds matrices, in a word; "" where every weight keeps its value. An export that
            rounds has other weights than its source: it counts as another quantization of the same model.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: The file has changed since it was opened, or can't be read.
    """
    weights = hash_weights(gguf)
    if rounding:
        weights = _text(hashlib.sha256(f"{weights} {rounding}".encode()))
    return {WEIGHTS_KEY: weights, NORMS_KEY: hash_norms(gguf)}


def _recorded(gguf: GGUF, key: str) -> str:
    return "" if gguf.tensors else get_text(gguf, key) or ""


def hash_weights(gguf: GGUF) -> str:
    """Return a hash of a model's tensors: names, shapes, types, and 4 KiB at the start and the middle of each.

    "" for a file without tensors. A file with the same hash has the same weights, unless somebody changed single
    numbers by hand: training changes all.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(gguf.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.type.name}\n".encode())
        for start in {0, tensor.n_bytes // 2}:
            digest.update(gguf.read_tensor_bytes(name, start, min(_SAMPLE_BYTES, tensor.n_bytes - start)))
    return _text(digest) if gguf.tensors else ""


def hash_norms(gguf: GGUF) -> str:
    """Return a hash of the numbers of all vectors (norms and biases); "" for a file that has none.

    Numbers are rounded to float16, because files differ in whether they keep vectors in F32, F16 or BF16.
    """
    digest, n_vectors = hashlib.sha256(), 0
    for name, values in _vectors(gguf):
        digest.update(name.encode())
        digest.update(values)
        n_vectors += 1
    return _text(digest) if n_vectors else ""


def hash_tokenizer(gguf: GGUF) -> str:
    """Return a hash of the tokens in the order of their ids; "" for a file that lists none."""
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    return "" if tokens is None else _text(hashlib.sha256(tokens.data))


def _vectors(gguf: GGUF) -> Iterator[tuple[str, bytes]]:
    for name, tensor in sorted(gguf.tensors.items()):
        if len(tensor.shape) == 1 and tensor.type in FLOATS and name.startswith(("blk.", "output_norm.")):
            values = floats(tensor.type, np.frombuffer(gguf.read_tensor_bytes(name), np.uint8))
            with np.errstate(over="ignore"):
                yield name, values.astype("<f2").tobytes()


def _text(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:_HASH_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A head that fits a model, and what the user should know of the pair.

    Attributes:
        head: The head; its card names the taps.
        notes: Sentences: another quantization, a target that the file does not name, layers that it does not name.
    """

    head: Head
    notes: tuple[str, ...]


def fit(head: Head, gguf: GGUF) -> Fitted:
    """Return the head as it is used with a model: taps filled in where the file names none.

    Args:
        gguf: The target's file, or the vocabulary of an exported folder, which has hashes instead of tensors.

    Raises:
        UnsupportedModelError: A size, the vocabulary, a tapped layer or the model itself is not the one that the head
            was trained for; the message names it.
    """
    card = fit_card(head.card, gguf)
    if card.reads_target and head.layers is not None and (reason := misfit(head.layers, gguf)) is not None:
        _refuse(card, reason)
    of_this_file = head.layers is not None and head.layers.header_hash == gguf.header_hash
    return Fitted(replace(head, card=card), (*card.notes, *(() if of_this_file else _kinship(card, gguf))))


def fit_card(card: HeadCard, gguf: GGUF) -> HeadCard:
    """Return the card with its taps filled in; raises what `fit` raises for sizes, vocabulary and layers."""
    info = describe(without_nextn(gguf))
    if card.n_embd_target != info.n_embd:
        _refuse(card, f"its taps have {card.n_embd_target} numbers, but the model's hidden states {info.n_embd}")
    if not (card.own_embedding or card.reads_target) and card.n_embd != info.n_embd:
        _refuse(card, f"it borrows embeddings of {card.n_embd} numbers, but the model's have {info.n_embd}")
    if not card.own_output and card.n_embd != info.n_embd:
        _refuse(card, f"it borrows an output matrix of {card.n_embd} columns, but the model's has {info.n_embd}")
    # Matrices are often padded beyond the list of tokens.
    if card.n_vocab_target not in (info.n_vocab, _n_rows(gguf)):
        _refuse(card, f"it was trained for {card.n_vocab_target} tokens, but the model has {info.n_vocab}")
    if card.rows is not None:
        if card.rows.layer >= info.n_layer:
            _refuse(card, f"its rows enter layer {card.rows.layer}, but the model has {info.n_layer} layers")
        return card
    if card.exits and card.taps[0] >= info.n_layer:
        _refuse(card, f"it leaves the model behind layer {card.taps[0]}, but the model has {info.n_layer} layers")
    taps = card.taps or ((info.n_layer,) if card.joins else default_taps(info.n_layer))
    if card.joins and taps != (info.n_layer,):
        _refuse(card, f"it reads what leaves layer {taps[0]}, but the model has {info.n_layer} layers")
    if beyond := [i for i in taps if i > info.n_layer]:
        _refuse(card, f"it taps layer {beyond[0]}, but the model has {info.n_layer} layers")
    if len(set(taps)) != len(taps):
        _refuse(card, f"the model's {info.n_layer} layers are too few for three different taps")
    return replace(card, taps=taps)


def default_taps(n_layer: int) -> tuple[int, int, int]:
    """Return the layers that EAGLE-3's code taps where nothing else is said, by the layer entered.

    >>> default_taps(28)
    (2, 14, 25)
    """
    return 2, n_layer // 2, max(n_layer - 3, 0)


def _n_rows(gguf: GGUF) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    return embedding.shape[1] if embedding is not None and len(embedding.shape) == 2 else 0


def _kinship(card: HeadCard, gguf: GGUF) -> tuple[str, ...]:
    """Return a note where the model may not be the one that the head learned from; refuse another model."""
    trained = card.target
    if trained is None or not (trained.weights_hash or trained.norms_hash or trained.tokenizer_hash):
        name = f" but calls it {trained.name!r}" if trained is not None and trained.name else ""
        return (f"the head {card.name} does not say by a hash which model it was trained for{name}",)
    target = target_of(gguf)
    if trained.tokenizer_hash and target.tokenizer_hash and trained.tokenizer_hash != target.tokenizer_hash:
        _refuse(card, f"it was trained for {trained.name!r}, which has other tokens than {target.name!r}")
    if not target.weights_hash:
        return (
            f"the export does not say by a hash which weights it was made of, so that nobody knows whether the head "
            f"{card.name} was trained for them; export the model again with this edgedec",
        )
    if trained.weights_hash == target.weights_hash:
        return ()
    if trained.norms_hash and trained.norms_hash != target.norms_hash:
        _refuse(card, f"it was trained for {trained.name!r}, and {target.name!r} is another model")
    return (
        f"the head {card.name} was trained with another quantization of {trained.name}; its drafts may be accepted a "
        "little less often",
    )


def _refuse(card: HeadCard, why: str) -> None:
    raise UnsupportedModelError(
        f"the draft head {card.name} does not fit the model: {why}; take a head that was trained for this model, or "
        "train one with edgedec train-drafter"
    )
