"""The shape of a narrow draft model, and the bytes that it reads for a token."""

from dataclasses import dataclass

from edgedec.errors import OptionError
from edgedec_runtimes.cpu.network import Network

DEFAULT_LAYERS = 4
_WIDTHS = 32  # a width is a multiple of this, so that rows are whole blocks of Q4_0 and Q8_0


@dataclass(frozen=True, slots=True)
class NarrowShape:
    """The sizes of a decoder of the architecture llama; heads are as long and as many as the target's.

    Attributes:
        n_vocab: Tokens; those of the target.
        n_embd: Its width: elements of a hidden state.
        n_ff: Elements of a feed-forward block.
        n_rot: Elements of a head that are rotated to their position, in pairs of neighbours.
        n_ctx_train: The context that the file names; the target's.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    n_ctx_train: int
    rope_base: float
    rms_epsilon: float

    @property
    def n_q(self) -> int:
        """Elements of a token's queries in one layer."""
        return self.n_head * self.head_dim

    @property
    def n_kv(self) -> int:
        """Elements of a token's keys (or values) in one layer."""
        return self.n_head_kv * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the sizes (out, in) of a layer's matrices by name."""
        n, ff = self.n_embd, self.n_ff
        attention = {"q": (self.n_q, n), "k": (self.n_kv, n), "v": (self.n_kv, n), "o": (n, self.n_q)}
        return attention | {"gate": (ff, n), "up": (ff, n), "down": (n, ff)}

    @property
    def n_layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        return self.n_layer * sum(n_out * n_in for n_out, n_in in self.matrices().values())


def shape_of(target: Network, n_layer: int | None = None, n_embd: int | None = None) -> NarrowShape:
    """Return the shape of a draft model.

    Args:
        target: The target's shape.
        n_layer: Layers; None for four.
        n_embd: Width; None for a third of the target's. Feed-forward blocks shrink by the same factor.

    Raises:
        OptionError: There are more layers than the target has, or the width is too large or no multiple of 32.
    """
    layers = DEFAULT_LAYERS if n_layer is None else n_layer
    if not 1 <= layers <= target.n_layer:
        raise OptionError("n_layers", layers, f"it must be from 1 to the target's {target.n_layer}")
    width = _rounded(target.n_embd / 3) if n_embd is None else n_embd
    if not _WIDTHS <= width <= target.n_embd or width % _WIDTHS:
        raise OptionError("width", width, f"it must be a multiple of {_WIDTHS}, at most the target's {target.n_embd}")
    return NarrowShape(
        n_vocab=target.n_vocab,
        n_embd=width,
        n_layer=layers,
        n_ff=_rounded(target.n_ff * width / target.n_embd),
        n_head=target.n_head,
        n_head_kv=target.n_head_kv,
        head_dim=target.head_dim,
        n_rot=target.n_rot,
        n_ctx_train=target.n_ctx_train,
        rope_base=target.rope_base,
        rms_epsilon=target.rms_epsilon,
    )


def _rounded(size: float) -> int:
    """Return the nearest multiple of 32, at least 32."""
    return max(1, round(size / _WIDTHS)) * _WIDTHS
