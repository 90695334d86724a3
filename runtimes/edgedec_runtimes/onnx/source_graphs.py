"""Checks and runs graphs of an encoder and a decoder, as optimum-onnx 0.1.0 exports them; all others are refused.

| input | of | type | meaning |
|---|---|---|---|
| input_ids | all | int64[1, S] | tokens; a later decoder may take one only |
| attention_mask, encoder_attention_mask | encoder, decoders | int64[1, N] | 1 for each token of the source |
| encoder_hidden_states | first decoder | float32[1, N, n_embd] | the encoder's last_hidden_state |
| past_key_values.i.decoder.key, .value | later decoder | float32[1, n_head, P, head_dim] | present.i... of the text |
| past_key_values.i.encoder.key, .value | later decoder | float32[1, n_head, N, head_dim] | present.i... of the source |
| use_cache_branch | merged decoder, which has all inputs | bool[1] | whether it is a later one |
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import EdgedecError, ModelFormatError, UnsupportedModelError
from edgedec.storage import probe_cache
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.foreign.contract import Contract
from edgedec_runtimes.onnx.foreign.model import Arrays, empty_caches
from edgedec_runtimes.onnx.library import translated
from edgedec_runtimes.shared.invariance import KIND

_BRANCH, _HIDDEN, _IDS, _MASK = "use_cache_branch", "encoder_hidden_states", "input_ids", "encoder_attention_mask"
_STATES, _LOGITS, _OF_SOURCE = "last_hidden_state", "logits", "attention_mask"
_KEY = re.compile(r"past_key_values\.\d+\.decoder\.key")
_KINDS = dict.fromkeys((_IDS, _MASK, _OF_SOURCE), ("tensor(int64)", 2)) | {_BRANCH: ("tensor(bool)", 1)}
_KINDS |= dict.fromkeys((_HIDDEN, _STATES, _LOGITS), ("tensor(float)", 3))  # all others are keys and values
_N_TRIED, _N_SOURCE = 3, 7  # rows that are tried, and tokens of the source before them
_NEAR = 1e-3  # of the largest logit: rows that a graph does not take together differ by far more


@dataclass(frozen=True, slots=True)
class SourceGraphs:
    """The opened graphs of an encoder and a decoder.

    Attributes:
        first, later: The decoder for the first token and for later ones; one graph where it is merged.
        contract: The sizes of the decoder.
        n_embd: Length of a row of what the encoder returns.
        more: Which inputs the later decoder has beside tokens, mask, and keys and values.
    """

    encoder: Any
    first: Any
    later: Any
    contract: Contract
    n_embd: int
    more: frozenset[str]

    def begin(self, source: NDArray[np.int32], start: int, options: Any) -> tuple[NDArray[np.float32], Arrays, Arrays]:
        """Return the logits f32[1, n_vocab] behind a text's first token, and the KV of the text and of the source.

        Args:
            source: int32[n], at least one token, which the encoder reads.
            start: The token that texts begin with.
            options: Run options of ONNX Runtime, which can stop the run.
        """
        ids, n = source.astype(np.int64)[None], 2 * self.contract.n_layer
        mask = np.ones_like(ids)
        with translated("a forward"):
            (hidden,) = self.encoder.run([_STATES], {_IDS: ids, _OF_SOURCE: mask}, options)
            inputs: dict[str, Any] = {_IDS: np.array([[start]], np.int64), _MASK: mask, _HIDDEN: hidden}
            if self.first is self.later:  # which reads no past, but needs some
                inputs |= dict(zip(_names(n, "past_key_values"), 2 * empty_caches(self.contract, 1), strict=True))
                inputs[_BRANCH] = np.zeros(1, np.bool_)
            logits, *arrays = self.first.run([_LOGITS, *_names(n, "present")], inputs, options)
        return logits[0], arrays[:n], arrays[n:]

    def go_on(
        self, tokens: NDArray[np.int32], caches: tuple[Arrays, Arrays], options: Any
    ) -> tuple[NDArray[np.float32], Arrays]:
        """Return the logits f32[n, n_vocab] of n tokens behind a text, and the keys and values of the longer text.

        Args:
            tokens: int32[n].
            caches: Keys and values of the text, and those of the source.
            options: Run options of ONNX Runtime, which can stop the run.
        """
        n, n_source = 2 * self.contract.n_layer, caches[1][0].shape[2]
        inputs: dict[str, Any] = dict(zip(_names(n, "past_key_values"), [*caches[0], *caches[1]], strict=True))
        inputs |= {_IDS: tokens.astype(np.int64)[None], _MASK: np.ones((1, n_source), np.int64)}
        if _BRANCH in self.more:
            inputs[_BRANCH] = np.ones(1, np.bool_)
        if _HIDDEN in self.more:  # of which no later token reads anything
            inputs[_HIDDEN] = np.zeros((1, n_source, self.n_embd), np.float32)
        with translated("a forward"):
            logits, *longer = self.later.run([_LOGITS, *_names(n, "present")[:n]], inputs, options)
        return logits[0], longer


def checked_graphs(opened: Sequence[Any], export: Export) -> SourceGraphs:
    """Return the graphs that ONNX Runtime has opened: the encoder, and the decoder for first and later tokens, or both.

    Raises:
        UnsupportedModelError: They are no encoder and decoder with a KV cache in float32.
        ModelFormatError: Their sizes are not those that config.json says.
    """
    encoder, first, later = opened[0], opened[1], opened[-1]
    read, begun, longer = ({port.name: port for port in graph.get_inputs()} for graph in (encoder, first, later))
    states, logits, more = ({port.name: port for port in graph.get_outputs()} for graph in (encoder, first, later))
    n = 2 * sum(_KEY.fullmatch(name) is not None for name in longer)
    past, present = _names(n, "past_key_values"), _names(n, "present")
    of_encoder, of_decoder = (f"{export.folder}: its {what}" for what in ("encoder", "decoder"))
    _check(of_encoder, read, [_IDS, _OF_SOURCE], [])
    _check(of_encoder, states, [_STATES])
    _check(of_decoder, begun, [_IDS, _MASK, _HIDDEN, *([*past, _BRANCH] if first is later else [])], [])
    _check(of_decoder, logits, [_LOGITS, *present])
    _check(of_decoder, longer, [_IDS, _MASK, *(past or _names(1, "past_key_values"))], [_HIDDEN, _BRANCH])
    _check(of_decoder, more, [_LOGITS, *present[:n]])
    counts = [("layers", n // 2, export.n_layer)]
    counts += [("numbers of a row", port.shape[2], export.n_embd) for port in (states[_STATES], begun[_HIDDEN])]
    counts += [("logits", port.shape[2], export.n_vocab) for port in (logits[_LOGITS], more[_LOGITS])]
    counts += [("heads", longer[name].shape[1], export.n_head_kv) for name in past]
    counts += [("numbers of a head", longer[name].shape[3], export.head_dim) for name in past]
    for what, count, expected in counts:
        if count != expected:
            raise ModelFormatError(
                f"{export.folder}: a graph has {count} {what}, config.json says {expected}; the files are of different "
                "models: export the model again"
            )
    contract = Contract(n // 2, export.n_head_kv, export.head_dim, export.n_vocab, has_positions=False)
    return SourceGraphs(encoder, first, later, contract, export.n_embd, frozenset({_HIDDEN, _BRANCH} & longer.keys()))


def takes_rows(graphs: SourceGraphs, cache_dir: Path | None, fingerprint: str) -> bool:
    """Return whether a later decoder takes several tokens, as tried once, and kept by the model's fingerprint.

    A graph that was traced with one token may take more, and let each see those behind it.
    """
    key, together = f"{fingerprint} takes rows", False
    if type(stored := probe_cache.get(cache_dir, KIND, key)) is bool:
        return stored
    rng, n_vocab = np.random.default_rng(0), graphs.contract.n_vocab or 1
    source, tokens = (rng.integers(0, n_vocab, n).astype(np.int32) for n in (_N_SOURCE, _N_TRIED))
    _, text, crossed = graphs.begin(source, 0, None)
    with suppress(EdgedecError):  # the graph can't
        rows, _ = graphs.go_on(tokens, (text, crossed), None)
        alone = []
        for i in range(_N_TRIED):
            row, text = graphs.go_on(tokens[i : i + 1], (text, crossed), None)
            alone.append(row[0])
        together = bool(np.abs(rows - alone).max() <= _NEAR * np.abs(alone).max())
    probe_cache.put(cache_dir, KIND, key, together)
    return together


def _names(n: int, before: str) -> list[str]:
    """Return the names of `n` keys and values of the text, and then of the source."""
    parts = [(i // 2, ("key", "value")[i % 2]) for i in range(n)]
    return [f"{before}.{layer}.{side}.{part}" for side in ("decoder", "encoder") for layer, part in parts]


def _check(what: str, ports: Mapping[str, Any], needed: list[str], more: list[str] | None = None) -> None:
    """Refuse ports without some that are needed, inputs that are not among `more` either, and those of other types."""
    wrong = [f"lacks {name!r}" for name in needed if name not in ports]
    for name, port in ports.items():
        kind, rank = _KINDS.get(name, ("tensor(float)", 4))
        if name not in needed and more is not None and name not in more:
            wrong.append(f"has the input {name[:80]!r}, whose meaning is not known here")
        if (name in needed or more) and (port.type, len(port.shape)) != (kind, rank):
            wrong.append(f"has {name} as {port.type}{list(port.shape)}"[:120] + f", expected {kind} with {rank} axes")
    if wrong:
        raise UnsupportedModelError(
            f"{what} {wrong[0]}; the onnx runtime takes encoders and decoders as optimum exports them for the task "
            "text2text-generation-with-past, with float32 in and out: export the model that way, or take a GGUF of it"
        )
