"""A trained draft head in memory: its card and its tensors, named alike whatever file they came from.

| tensor | shape |
|---|---|
| fc | n_embd, n_taps * n_embd_target |
| q | n_head * head_dim, 2 * n_embd: the columns are the embedding's, then the feature's; so in k and v |
| k, v | n_head_kv * head_dim, 2 * n_embd |
| o | n_embd, n_head * head_dim |
| gate, up | n_ff, n_embd |
| down | n_embd, n_ff |
| input_norm | n_embd: of the embedding |
| hidden_norm | n_embd: of the feature |
| post_attention_norm | n_embd: before gate and up |
| output_norm | n_embd; absent where the card's norms_output is false |
| fc_norm | n_taps * n_embd_target; only where the card's fc_norm is not "none" |
| embedding | n_vocab_target, n_embd; only where the card says own_embedding |
| output | n_vocab_draft, n_embd; only where the card says own_output |
| rope_divisors | head_dim / 2; only where the head's RoPE is scaled |

A head that joins pairs (nextn) has input_norm, hidden_norm, fc_norm, embedding and output as above, and beside its
layers, which are a model's, this one:

| tensor | shape |
|---|---|
| joint | n_embd, 2 * n_embd: the columns are the embedding's, then the feature's |

One whose layers see the target's keys and values has `output` as above beside its layers, and these:

| tensor | shape |
|---|---|
| joint | n_embd, 2 * n_embd_target: likewise |
| fc | n_embd_target, n_embd: what makes the next feature of what leaves its last norm |

A row head has these, where its card's `rows` are n rows, and `output` as above:

| tensor | shape |
|---|---|
| rows | n * n_embd, n_embd: what makes of a state what is added to each row; only behind layer 0 |
| rows_kept | n * n_embd: what the state is multiplied by; only behind layer 0 |
| rows_base | n * n_embd: what rows enter layer 0 with; only there |

An exit head has `output` as above, and these:

| tensor | shape |
|---|---|
| input_norm | n_embd: of the state |
| q, k, v | n_head * head_dim, n_embd; n_head_kv * head_dim, n_embd |
| o | n_embd, n_head * head_dim |
| output_norm | n_embd |

A block head has fc, output_norm, embedding, output and rope_divisors as above, and instead of the others these, where i
counts its layers from 0:

| tensor | shape |
|---|---|
| hidden_norm | n_embd: of what fc makes |
| mask | n_embd: the embedding of masked rows; only where the card names no mask_token |
| layers.i.q | n_head * head_dim, n_embd |
| layers.i.k, layers.i.v | n_head_kv * head_dim, n_embd |
| layers.i.o | n_embd, n_head * head_dim |
| layers.i.gate, layers.i.up | n_ff, n_embd |
| layers.i.down | n_embd, n_ff |
| layers.i.input_norm, layers.i.post_attention_norm | n_embd |
| layers.i.q_norm, layers.i.k_norm | head_dim |
| layers.i.attention_conv_base, layers.i.mlp_conv_base | 2, conv_length, n_embd: before the block, behind it |
| layers.i.attention_conv_proj, layers.i.mlp_conv_proj | 2 * conv_length * n_embd / conv_group, n_embd: likewise |
| markov_w1 | n_vocab_target, rank: row t is e after token t; where markov is "vanilla", "gated" or "rnn" |
| markov_w2 | n_vocab_draft, rank; likewise |
| markov_gate | rank, n_embd + rank: the columns are the state's, then e's; only where markov is "gated" |
| markov_gate_bias | rank; likewise |
| markov_joint | 3 * rank, 2 * rank + n_embd: update gate, candidate, output of recurrent state, e, state; for "rnn" |
| markov_joint_bias | 3 * rank; likewise |
| selector_predecessor | n_vocab_target, rank: row t is e after token t; only where the card's markov is "selector" |
| selector_successor | n_vocab_target, rank: row t is what e is multiplied with for token t; likewise |
| selector_hidden | rank, n_embd: what the state makes of e; likewise |
| confidence | 1, n_embd + rank: the columns are the state's, then e's; only where the card's confidence says so |
| confidence_bias | 1; likewise |

The state here is that of a row after output_norm. A convolution's kernels are its base, and what its proj makes of the
row that enters the block, after the norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.weights.levels import dequantize

_NUMBERS_AT_ONCE = 1 << 18  # a megabyte as float32, which stays in the processor's cache
_SCALED = (GGMLType.Q4_0, GGMLType.Q8_0)  # a block is a float16 number, times integers
_HALF_EXPONENT = np.uint16(0x7C00)  # all of its bits are set where a float16 is infinite or no number


@dataclass(frozen=True, slots=True, eq=False)
class HeadTensor:
    """A tensor of a head.

    Attributes:
        shape: (rows, columns), or (n,) for a vector: the last size is the length of a row.
        type: How the numbers are stored.
        data: uint8[n_bytes], the rows one after another, as a GGUF of this type holds them.
    """

    shape: tuple[int, ...]
    type: GGMLType
    data: NDArray[np.uint8]

    def floats(self) -> NDArray[np.float32]:
        """Return the numbers, float32[shape]."""
        return dequantize(self.type, self._rows()).reshape(self.shape)

    def is_finite(self) -> bool:
        """Return whether all numbers are finite."""
        if self.type is GGMLType.F16 or self.type in _SCALED:
            halves = self.data.view("<u2")[:: self.type.block_bytes // 2]
            return not bool((halves & _HALF_EXPONENT == _HALF_EXPONENT).any())
        rows = self._rows()
        step = max(1, _NUMBERS_AT_ONCE // self.shape[-1])
        parts = (rows[begin : begin + step] for begin in range(0, len(rows), step))
        return all(np.isfinite(dequantize(self.type, part)).all() for part in parts)

    def _rows(self) -> NDArray[np.uint8]:
        return self.data.reshape(math.prod(self.shape[:-1]), -1)

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> "HeadTensor":
        """Return float32 numbers as a tensor."""
        data = np.ascontiguousarray(values, np.float32)
        return cls(values.shape, GGMLType.F32, data.reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head whose tensors have the shapes that its card says.

    Attributes:
        tensors: By the names of the table above.
        d2t: int32[n_vocab_draft], for each row of the output matrix the target's token id; all different.
        layers: The header of a model whose layers are those of a head that joins pairs; None for other heads.
    """

    card: HeadCard
    tensors: Mapping[str, HeadTensor]
    d2t: NDArray[np.int32]
    layers: GGUF | None = None

    def shortened(self, n_vocab: int) -> "Head":
        """Return the head with the first `n_vocab` tokens of its list only; the head itself where it has no more."""
        if n_vocab >= len(self.d2t):
            return self
        tensors = dict(self.tensors)
        for name in tensors.keys() & {"output", "markov_w2"}:
            listed = tensors[name]
            rows = listed.data.reshape(len(self.d2t), -1)[:n_vocab]
            tensors[name] = HeadTensor((n_vocab, listed.shape[1]), listed.type, rows.reshape(-1))
        card = replace(self.card, n_vocab_draft=n_vocab)
        return replace(self, card=card, tensors=tensors, d2t=self.d2t[:n_vocab])

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors as they are stored."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values()) + sum(t.n_bytes for t in self.of_layers)

    @property
    def of_layers(self) -> list[TensorInfo]:
        """The tensors of `layers` that are the head's own."""
        return [t for name, t in self.layers.tensors.items() if name.startswith("blk.")] if self.layers else []


def to_halves(tensor: HeadTensor, n_heads: int) -> HeadTensor:
    """Reorder the rows of q or k from pairs of neighbours to halves of a head; a row keeps its bytes.

    A norm's vector is a tensor of one head, whose rows are its numbers.
    """
    rows = tensor.data.reshape(n_heads, tensor.shape[0] // n_heads // 2, 2, -1)
    return HeadTensor(tensor.shape, tensor.type, np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1))
