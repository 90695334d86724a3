"""A GGUF model that says what it is told to: after each last token of a prompt, pieces that are known beforehand.

    path = saying_model(tmp_path / "m.gguf", {"?": ["Two", " and", " two"]})

The model has no attention and no feed-forward to speak of: its next token follows from the last one alone.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import ValueType
from support.models.gguf_writer import Typed, write_gguf
from support.models.tiny_models import EOS, FIRST_BYTE, N_VOCAB, SPACE, vocabulary

N_EMBD, N_HEAD, N_FF = 384, 4, 32
_CONTROL, _USER_DEFINED = 3, 4
_SURE = 60.0

SHOWING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
"""A chat template that shows tools, messages and calls."""


def saying_model(
    path: Path,
    says: Mapping[str, Sequence[str]],
    *,
    chat_template: str | None = None,
    n_ctx_train: int = 2048,
    control: Collection[str] = (),
) -> Path:
    """Write the model and return its path.

    Args:
        path: The file.
        says: By the last character, or the last piece, of a prompt, the pieces of the answer; "" stands for all
            characters without an entry. Each piece is a token, which is followed by the same piece wherever it stands.
        chat_template: The chat template, in Jinja.
        n_ctx_train: Tokens of the context.
        control: The pieces that are control tokens, which add nothing to a text.
    """
    pieces = list(dict.fromkeys(piece for answer in says.values() for piece in answer))
    pieces += [last for last in says if len(last.encode()) > 1 and last not in pieces]
    token_of = {piece: N_VOCAB + i for i, piece in enumerate(pieces)}
    n_vocab = N_VOCAB + len(pieces)
    assert n_vocab <= N_EMBD
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "saying",
        "llama.context_length": n_ctx_train,
        "llama.embedding_length": N_EMBD,
        "llama.block_count": 1,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": N_HEAD,
        "llama.attention.head_count_kv": N_HEAD,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": N_EMBD // N_HEAD,
    } | vocabulary(n_vocab)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:N_VOCAB], *pieces]
    kinds: Typed = metadata["tokenizer.ggml.token_type"]
    kinds = Typed(
        ValueType.ARRAY,
        [*kinds.value[:N_VOCAB], *(_CONTROL if piece in control else _USER_DEFINED for piece in pieces)],
        ValueType.INT32,
    )
    metadata["tokenizer.ggml.token_type"] = kinds
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    zeros = {
        "attn_q": N_EMBD,
        "attn_k": N_EMBD,
        "attn_v": N_EMBD,
        "attn_output": N_EMBD,
        "ffn_gate": N_FF,
        "ffn_up": N_FF,
    }
    tensors: dict[str, NDArray[Any]] = {
        "token_embd.weight": np.eye(n_vocab, N_EMBD, dtype=np.float32),
        "output_norm.weight": np.ones(N_EMBD, np.float32),
        "output.weight": _following(says, token_of, n_vocab),
        "blk.0.attn_norm.weight": np.ones(N_EMBD, np.float32),
        "blk.0.ffn_norm.weight": np.ones(N_EMBD, np.float32),
        "blk.0.ffn_down.weight": np.zeros((N_EMBD, N_FF), np.float32),
    }
    tensors |= {f"blk.0.{name}.weight": np.zeros((n_out, N_EMBD), np.float32) for name, n_out in zeros.items()}
    return write_gguf(path, metadata, tensors)


def _following(says: Mapping[str, Sequence[str]], token_of: Mapping[str, int], n_vocab: int) -> NDArray[np.float32]:
    """Return f32[n_vocab, N_EMBD], a matrix that gives the token after each token a large logit."""
    after: dict[int, int] = {}
    for last, answer in says.items():
        chain = [token_of[piece] for piece in answer]
        for token_id, following in pairwise(chain):
            assert after.setdefault(token_id, following) == following, "a piece is followed by two others"
        begins = [*range(N_VOCAB)] if not last else [token_of[last] if last in token_of else _byte(last)]
        after |= {token_id: (chain or [EOS])[0] for token_id in begins if last or token_id not in after}
    after = dict.fromkeys(token_of.values(), EOS) | after
    matrix = np.zeros((n_vocab, N_EMBD), np.float32)
    for token_id, following in after.items():
        matrix[following, token_id] = _SURE / N_EMBD**0.5
    return matrix


def _byte(character: str) -> int:
    return SPACE if character == " " else FIRST_BYTE + ord(character)
