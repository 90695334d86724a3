"""T(1) to T(16) of a random BlockFFN in the proportions of its 0.5B, and how many experts the rows share.

    python benchmarks/speed/blockffn.py --runs 15 --layers 27

Rows of random tokens choose their experts independently; rows of one token choose the same ones. A published model lies
between (chunk-level sparsity, arXiv:2507.08771). The embeddings have a common direction that routers dislike, so that
a row goes through a fifth of the experts, as in trained ones; layers add little, so that it stays so.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu

SCALES = (("embedding_scale", 12.0), ("logit_scale", 5.0), ("residual_scale", 0.02))
COMMON, DISLIKE = 8.0, 0.11


def write(path: Path, n_layer: int, n_expert: int) -> Path:
    """Write the model and return its path."""
    tiny = Tiny(
        "blockffn",
        ("Q4_1",),
        n_layer=n_layer,
        n_embd=1280,
        n_head=10,
        n_head_kv=2,
        head_dim=128,
        n_vocab=32_000,
        n_expert=n_expert,
        n_expert_used=n_expert,
        n_ff_expert=128,
        keys=SCALES,
    )
    rng, tensors = np.random.default_rng(1), tiny_tensors(tiny)
    table = (rng.standard_normal((tiny.n_vocab, tiny.n_embd)) * 0.1).astype(np.float16)
    table[:, 0] = COMMON * 0.1
    tensors["token_embd.weight"] = RawTensor(GGMLType.F16, (tiny.n_embd, tiny.n_vocab), table.tobytes())
    for i in range(n_layer):
        router = (rng.standard_normal((n_expert, tiny.n_embd)) / tiny.n_embd**0.5).astype(np.float32)
        router[:, 0] = -DISLIKE
        tensors[f"blk.{i}.ffn_gate_inp.weight"] = RawTensor(GGMLType.F32, (tiny.n_embd, n_expert), router.tobytes())
    return write_gguf(path, tiny_metadata(tiny), tensors)


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    rng, found = np.random.default_rng(2), dict[str, object]()
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "blockffn.gguf"), given.layers, given.experts)
        found["file_bytes"] = path.stat().st_size
        for kind in ("independent", "the same"):
            with Cpu().load(path, LoadOptions(n_ctx=256, n_threads=given.threads, cache_dir=Path(folder))) as model:
                session, times = model.session(256), dict[int, list[float]]()
                session.forward(rng.integers(0, 32_000, 64).astype(np.int32), n_past=0)
                for _ in range(given.runs + 2):
                    for n in (1, 2, 4, 8, 16):
                        row = rng.integers(0, 32_000, n).astype(np.int32)
                        rows = row if kind == "independent" else np.full(n, row[0], np.int32)
                        start = time.perf_counter()
                        session.forward(rows, n_past=64, rows="all")
                        times.setdefault(n, []).append(time.perf_counter() - start)
                touched = model.experts_touched()
                found[kind] = {
                    n: (round(1000 * float(np.median(t[2:])), 2), round(touched[n], 1)) for n, t in times.items()
                }
    print(json.dumps({"benchmark": "blockffn", "layers": given.layers, "experts": given.experts} | found))


if __name__ == "__main__":
    main()
