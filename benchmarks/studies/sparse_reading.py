"""What sparse products and sparse attention cost in distance, before anything of them is built: a simulation in floats.

    python benchmarks/studies/sparse_reading.py MODEL.gguf --text FILE --tokens 1024 --json-out FILE

The model reads a text in floats: as it is, and with each change. Of the last --rows tokens the script prints the mean
KL divergence of the next token's distribution from the whole model's, and how often the best token is the same.

- `wina S`, `teal S`: of each row that enters a matrix the share S of the elements is 0: those of the least |x| times
  the norm of the matrix's column (WINA, Chen et al. 2025, arXiv:2505.19427), or of the least |x| (TEAL, Liu et al.
  2024, arXiv:2408.14690).
- `blocks S`: as WINA by whole blocks of 32 columns, which is what a file of quantized rows could leave unread.
- `top S`: each of the last rows attends to the share S of the tokens with the best scores, by head: what any method
  that chooses tokens can reach at best.
- `channels S`: to those with the best scores of a quarter of the elements of queries and keys, chosen for the head on
  the first half of the text (Double Sparsity, Yang et al. 2024, arXiv:2408.07092).
- `recycled S`: to the tokens of the best scores of the row before it whose number is a multiple of 50, and to all since
  (Recycled Attention, Xu et al. 2024, arXiv:2411.05787).
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "texts"))

from float_truth import F32, F64, FloatModel, log_softmax

from edgedec.gguf.file import GGUF, read_gguf
from edgedec.load_options import LoadOptions
from edgedec_apps.bench.provenance import report
from edgedec_runtimes.cpu.runtime import Cpu  # for the tokenizer

_BLOCK = 32
_STRIDE = 50


class SparseFloats(FloatModel):
    """A model in floats of which one part is sparse.

    Attributes:
        method: The change, "" for none.
        share: The share of it.
        n_rows: How many of the last rows attend sparsely.
    """

    def __init__(self, gguf: GGUF, n_rows: int) -> None:
        super().__init__(gguf)
        self.method, self.share, self.n_rows = "", 0.0, n_rows
        self._matrices: dict[str, F32] = {}

    def matrix(self, name: str) -> F32:
        """Return f32[n_rows, n_columns]; it is kept."""
        if name not in self._matrices:
            self._matrices[name] = super().matrix(name)
        return self._matrices[name]

    def _times(self, name: str, x: F64, bias: str = "") -> F64:
        if self.method in ("wina", "teal", "blocks"):
            norms = np.linalg.norm(self.matrix(name), axis=0) if self.method != "teal" else np.ones(x.shape[1])
            worth = np.abs(x) * norms
            if self.method == "blocks":
                worth = np.sqrt((worth**2).reshape(len(x), -1, _BLOCK).sum(2))
            n_left_out = int(self.share * worth.shape[1])
            least = np.partition(worth, n_left_out, axis=1)[:, n_left_out : n_left_out + 1]
            kept = worth >= least
            x = x * (np.repeat(kept, _BLOCK, axis=1) if self.method == "blocks" else kept)
        return super()._times(name, x, bias)

    def _attend(self, q: F64, k: F64, v: F64, window: int, sinks: F32 | None) -> F64:
        n, group, first = len(q), self._network.n_head // self._network.n_head_kv, len(q) - self.n_rows
        hidden, out = np.triu(np.ones((n, n), np.bool_), 1), np.empty(q.shape, np.float32)
        for head in range(q.shape[1]):
            queries, keys = q[:, head].astype(np.float32), k[:, head // group].astype(np.float32)
            scores = np.where(hidden, -np.inf, queries @ keys.T * np.float32(self._network.switches.attention_scale))
            if self.method in ("top", "channels", "recycled"):
                guesses = scores
                if self.method == "channels":
                    use = np.abs(queries[: n // 2] * keys[: n // 2]).mean(0).argsort()[-queries.shape[1] // 4 :]
                    guesses = np.where(hidden, -np.inf, queries[:, use] @ keys[:, use].T)
                for row in range(first, n):
                    of = row // _STRIDE * _STRIDE if self.method == "recycled" else row
                    n_kept = max(1, int(self.share * (of + 1)))
                    kept = np.argpartition(-guesses[of], n_kept)[:n_kept] if n_kept < n else np.arange(n)
                    seen = np.zeros(n, np.bool_)
                    seen[kept], seen[of : row + 1] = True, True
                    scores[row, ~seen] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = shares / shares.sum(axis=1, keepdims=True) @ v[:, head // group].astype(np.float32)
        return out.reshape(n, -1).astype(np.float64)


def main() -> None:
    """Read, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--changes", nargs="+", help="such as wina:0.5; by default those of the table")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    changes = args.changes or [
        *(f"{name}:{share}" for name in ("wina", "teal", "blocks") for share in (0.25, 0.5)),
        *(f"{name}:{share}" for name in ("top", "channels", "recycled") for share in (0.05, 0.1, 0.25)),
    ]
    with Cpu().load(args.model, LoadOptions(n_ctx=64, n_threads=1)) as model:
        ids = model.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    floats = SparseFloats(read_gguf(args.model), args.rows)
    text = np.array(ids, np.int32)

    def rows() -> F64:
        return log_softmax(floats.logits(floats.states([text])[0][-args.rows :]).astype(np.float64))

    whole, results = rows(), {}
    for change in changes:
        floats.method, _, share = change.partition(":")
        floats.share = float(share)
        found = rows()
        kl = float((np.exp(whole) * (whole - found)).sum(axis=1).mean())
        same = float((whole.argmax(axis=1) == found.argmax(axis=1)).mean())
        results[change] = {"kl": kl, "same": same}
        print(f"{change:>14}: KL {kl:.4f}, same token {same:.3f}", flush=True)
    report({"benchmark": "sparse_reading", "tokens": len(ids), "rows": args.rows, "results": results}, args.json_out)


if __name__ == "__main__":
    main()
