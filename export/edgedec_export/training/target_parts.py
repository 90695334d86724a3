"""The parts of a target that a head borrows: embeddings, rows of the output matrix, the norm before that, its shape."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec_export.source import read_vector
from edgedec_export.target_rows import EMBEDDING, output_name
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.shared.hyperparameters import ATTENTION
from edgedec_runtimes.trained_heads.card import HeadCard, Target
from edgedec_runtimes.trained_heads.target import default_taps
from edgedec_runtimes.weights.levels import dequantize

_LEAST_LAYERS = 7  # with fewer, two of the taps are one


@dataclass(frozen=True)
class TargetParts:
    """A target's file, read where a head needs it.

    Attributes:
        gguf: The file's header.
        network: The target's shape.
    """

    gguf: GGUF
    network: Network

    @classmethod
    def of(cls, gguf: GGUF) -> "TargetParts":
        """Return the parts of a GGUF.

        Raises:
            UnsupportedModelError: The cpu runtime does not run the file, the model does not write left to right, scales
                its logits or has no attention, or it has too few layers for three taps.
        """
        require_text_decoder(gguf, may_embed=True)
        network = read_network(gguf)
        if not network.n_with(ATTENTION):
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: no layer of {network.architecture} has attention, whose sizes a head takes over; "
                "train for another model"
            )
        if network.switches.logit_scale != 1 or network.switches.logit_softcap:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: {network.architecture} scales or caps its logits, and the training of drafts takes "
                "only models that do not; train for another model"
            )
        if network.n_layer < _LEAST_LAYERS:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: it has {network.n_layer} layers; a head taps three of at least {_LEAST_LAYERS}"
            )
        return cls(gguf, network)

    @property
    def taps(self) -> tuple[int, int, int]:
        """The layers whose input a head sees, counted from 0."""
        return default_taps(self.network.n_layer)

    @property
    def layers_kept(self) -> tuple[int, ...]:
        """The layers whose output is what enters the tapped ones, and the last layer."""
        return (*(tap - 1 for tap in self.taps), self.network.n_layer - 1)

    @cached_property
    def output_norm(self) -> NDArray[np.float32]:
        """float32[n_embd], the weights of the norm before the output matrix."""
        return read_vector(usual_tensors(self.gguf, self.network), "output_norm.weight")

    def embeddings(self, token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return float32[n, n_embd], the embeddings of tokens, not scaled."""
        return self._rows(EMBEDDING, token_ids)

    def output_rows(self, token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return float32[n, n_embd], the rows of the output matrix for tokens."""
        return self._rows(output_name(self.gguf), token_ids)

    def _rows(self, name: str, token_ids: NDArray[np.integer]) -> NDArray[np.float32]:
        tensor = self.gguf.tensors[name]
        if name not in self._matrices:
            data = np.frombuffer(self.gguf.read_tensor_bytes(name), np.uint8)
            self._matrices[name] = data.reshape(tensor.shape[1], -1)
        return dequantize(tensor.type, self._matrices[name][token_ids])

    @cached_property
    def _matrices(self) -> dict[str, NDArray[np.uint8]]:
        return {}


def card_of(parts: TargetParts, name: str, n_vocab_draft: int, target: Target | None) -> HeadCard:
    """Return the card of a new head: a Llama layer of the target's width, three taps, and the target's output rows.

    Args:
        parts: The target.
        name: The head's name.
        n_vocab_draft: How many tokens the head can draft.
        target: What identifies the target.
    """
    n = parts.network
    return HeadCard(
        name=name,
        n_embd=n.n_embd,
        n_embd_target=n.n_embd,
        n_ff=n.n_ff if 0 < n.n_ff <= 3 * n.n_embd else 2 * n.n_embd,
        n_head=n.n_head,
        n_head_kv=n.n_head_kv,
        head_dim=n.head_dim,
        rms_epsilon=n.rms_epsilon,
        rope_base=n.rope_base,
        taps=parts.taps,
        n_vocab_draft=n_vocab_draft,
        n_vocab_target=n.n_vocab,
        target=target,
    )
