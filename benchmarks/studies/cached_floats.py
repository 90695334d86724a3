"""A model in floats that keeps keys and values, and reads any vectors in place of tokens' embeddings.

model = CachedFloats(read_gguf(path))
cache = Cache()
logits = model.forward([model.embeddings(prompt_ids)], [cache])[0]          # the prompt
logits = model.forward([weights @ model.embeddings(last_tokens)], [cache])  # one row that is a mixture
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "texts"))

from float_truth import F32, F64, FloatModel, _turn, log_softmax

from edgedec.gguf.file import GGUF
from edgedec_runtimes.architectures.rope import turns_in

Cache = dict[int, tuple[F64, F64]]
"""By layer the keys, turned to their positions, and the values: f64[n_past, n_heads, head_dim] each."""


class CachedFloats(FloatModel):
    """Evaluates the next rows of several texts; for models of the architectures llama and qwen2."""

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self._matrices: dict[str, F32] = {}
        self._caches: list[Cache] = []

    def matrix(self, name: str) -> F32:
        """Return f32[n_rows, n_columns]; it is dequantized once."""
        if name not in self._matrices:
            self._matrices[name] = super().matrix(name)
        return self._matrices[name]

    def embeddings(self, token_ids: list[int]) -> F64:
        """Return f64[n, n_embd], what enters the first layer for each token."""
        rows = self.matrix("token_embd.weight")[token_ids].astype(np.float64)
        return rows * self.network.switches.embedding_scale

    def forward(self, inputs: list[F64], caches: list[Cache]) -> F32:
        """Return f32[n_texts, n_vocab], the logits after the last row of each text; caches grow by the rows.

        Args:
            inputs: f64[n, n_embd] for each text, its next rows.
            caches: What came before in each text.
        """
        self._caches = caches
        ends = np.cumsum([len(rows) for rows in inputs])
        spans = [slice(end - len(rows), end) for end, rows in zip(ends, inputs, strict=True)]
        x = np.concatenate(inputs)
        for layer in range(self.network.n_layer):
            x = x + self._attention(layer, x, spans)
            x = x + self._feed_forward(layer, x)
        return self.logits(self._norm("output_norm.weight", x[ends - 1]))

    def _attention(self, layer: int, x: F64, spans: list[slice]) -> F64:
        n, blk = self.network, f"blk.{layer}"
        x = self._norm(f"{blk}.attn_norm.weight", x)
        q, k, v = (self._times(f"{blk}.attn_{name}.weight", x, f"{blk}.attn_{name}.bias") for name in "qkv")
        q, k, v = (y.reshape(len(x), -1, n.head_dim) for y in (q, k, v))
        starts = [len(cache[layer][0]) if layer in cache else 0 for cache in self._caches]
        places = [np.arange(s.stop - s.start) + start for s, start in zip(spans, starts, strict=True)]
        turns = turns_in(self._gguf, n.switches.rope_of(layer), self._n_ctx)
        angles = np.concatenate(places)[:, None] * turns.frequencies
        q, k = (_turn(y, angles, interleaved=n.switches.rope_interleaved) * turns.magnitude for y in (q, k))
        mixed = np.empty((len(x), n.n_head * n.head_dim))
        for span, cache in zip(spans, self._caches, strict=True):
            past = cache.get(layer, (k[:0], v[:0]))
            cache[layer] = np.concatenate([past[0], k[span]]), np.concatenate([past[1], v[span]])
            mixed[span] = _attended(q[span], *cache[layer], scale=n.switches.attention_scale)
        return self._times(f"{blk}.attn_output.weight", mixed, f"{blk}.attn_output.bias")


def _attended(q: F64, k: F64, v: F64, *, scale: float) -> F64:
    """Return f64[n, n_head * head_dim] for f64[n, n_head, head_dim] queries, the last n of the keys' positions."""
    n, m = len(q), len(k)
    grouped = q.reshape(n, k.shape[1], -1, q.shape[-1])
    scores = np.einsum("nkgd,mkd->kgnm", grouped, k) * scale
    scores = np.where(np.arange(m) > np.arange(m - n, m)[:, None], -np.inf, scores)
    mixed: F64 = np.einsum("kgnm,mkd->nkgd", np.exp(log_softmax(scores)), v).reshape(n, -1)
    return mixed
