"""Measure a synthetic mixture of experts, or a synthetic Gemma 4, on the cpu runtime and on llama.cpp, side by side.

    python benchmarks/speed/moe.py --prepare     # write the model, and make its tiles
    python benchmarks/speed/moe.py
    python benchmarks/speed/moe.py --gemma4

The model has the shape of Qwen3-30B-A3B in proportion (128 experts, 8 of them a token; the head has the same share of a
token's bytes), scaled down so that its file has 1.5 GB, and the tensor types of Q4_K_M. Its blocks are random, and its
routers spread random tokens over all experts, so that rows go through more experts than those of a real text. The model
lies in the cache (`moe/` below EDGEDEC_CACHE) and is written once. Gemma 4 has the widths of E2B, with 10 layers in
place of 35 and 65,536 tokens in place of 262,144: five layers with keys and values, and five twice as wide blocks
behind them that share these; its matrices are random blocks of Q4_0.

Both runtimes run in this process, in turn, with the same number of threads. T(n) is one forward of n new tokens on 256
cached ones that returns all rows of logits; every run has other tokens, and so other experts. The figures are medians,
in milliseconds. At last the cpu runtime holds a part of the weights in memory and reads the other experts from the
disk; the time of a step is compared with what the memory plan says. It is measured on random tokens, and on tokens of
which some are frequent (Zipf's law), whose experts are favourites. The last line is JSON.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgedec_apps.bench.provenance import report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks
from support.models.tiny_models import vocabulary
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.cpu.library import read_bandwidth
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.cache import known_tile_file
from edgedec_runtimes.cpu.tiles.read_rates import Pace, scattered_rate
from edgedec_runtimes.cpu.weights import stream_plan, tile_job
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.shared.cpu_count import usable_cores

N_EMBD, N_LAYER, N_HEAD, N_HEAD_KV, HEAD_DIM = 1024, 12, 16, 2, 128
N_EXPERT, N_EXPERT_USED, N_FF_EXPERT, N_VOCAB = 128, 8, 512, 24576
BATCHES = (1, 2, 4, 8, 16)
N_PAST, N_PREFILL = 256, 256
PAUSE = 0.03  # seconds; OpenMP's threads wait actively for some milliseconds after a forward of llama.cpp


E2B = Tiny(
    "gemma4",
    types=("Q4_0",),
    n_layer=10,
    n_embd=1536,
    n_head=8,
    n_head_kv=1,
    head_dim=512,
    narrow=256,
    whole=5,
    n_shared=5,
    n_ff=6144,
    n_per_layer=256,
    sliding_window=512,
    n_ctx_train=4096,
    n_vocab=65536,
    tied=True,
)


def model_path(*, gemma4: bool = False) -> Path:
    """Return where a model lies in the cache."""
    return cache_folder() / "moe" / f"synthetic-{'gemma4-Q4_0' if gemma4 else 'qwen3moe-Q4_K_M'}.gguf"


def metadata() -> dict[str, Any]:
    """Return the model's metadata."""
    keys: dict[str, Any] = {
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "block_count": N_LAYER,
        "feed_forward_length": 8 * N_FF_EXPERT,
        "expert_feed_forward_length": N_FF_EXPERT,
        "expert_count": N_EXPERT,
        "expert_used_count": N_EXPERT_USED,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    general = {"general.architecture": "qwen3moe", "general.name": "synthetic mixture of experts"}
    return general | {f"qwen3moe.{key}": value for key, value in keys.items()} | vocabulary(N_VOCAB)


def tensors() -> dict[str, RawTensor]:
    """Return the model's tensors; those that Q4_K_M has in Q6_K are in half of the layers."""
    rng = np.random.default_rng(0)

    def matrix(n_out: int, n_in: int, kind: str = "Q4_K", n: int = 1, spread: float = 0.0) -> RawTensor:
        data = random_blocks(kind, n * n_out, n_in, rng, spread or n_in**-0.5)
        return RawTensor(GGMLType[kind], (n_in, n_out, n) if n > 1 else (n_in, n_out), data)

    def floats(*shape: int, mean: float = 0.0, spread: float = 0.1) -> RawTensor:
        values = (mean + spread * rng.standard_normal(shape)).astype(np.float32)
        return RawTensor(GGMLType.F32, shape[::-1], values.tobytes())

    # Large embeddings, so that the states of different tokens, and so their experts, differ in every layer.
    found = {"token_embd.weight": matrix(N_VOCAB, N_EMBD, spread=6.0), "output_norm.weight": floats(N_EMBD, mean=1.0)}
    for i in range(N_LAYER):
        finer = "Q6_K" if i % 2 else "Q4_K"
        layer = {
            "attn_norm.weight": floats(N_EMBD, mean=1.0),
            "attn_q.weight": matrix(N_HEAD * HEAD_DIM, N_EMBD),
            "attn_k.weight": matrix(N_HEAD_KV * HEAD_DIM, N_EMBD),
            "attn_v.weight": matrix(N_HEAD_KV * HEAD_DIM, N_EMBD, finer),
            "attn_q_norm.weight": floats(HEAD_DIM, mean=1.0),
            "attn_k_norm.weight": floats(HEAD_DIM, mean=1.0),
            "attn_output.weight": matrix(N_EMBD, N_HEAD * HEAD_DIM),
            "ffn_norm.weight": floats(N_EMBD, mean=1.0),
            "ffn_gate_inp.weight": floats(N_EXPERT, N_EMBD, spread=2 * N_EMBD**-0.5),
            "ffn_gate_exps.weight": matrix(N_FF_EXPERT, N_EMBD, n=N_EXPERT),
            "ffn_up_exps.weight": matrix(N_FF_EXPERT, N_EMBD, n=N_EXPERT),
            "ffn_down_exps.weight": matrix(N_EMBD, N_FF_EXPERT, finer, n=N_EXPERT),
        }
        found |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return found | {"output.weight": matrix(N_VOCAB, N_EMBD, "Q6_K")}


def prepare(options: LoadOptions, *, gemma4: bool) -> Path:
    """Write a model, if it is not there, make its tiles, and return its path."""
    path = model_path(gemma4=gemma4)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".partial")
        (write_tiny(part, E2B) if gemma4 else write_gguf(part, metadata(), tensors())).replace(path)
    Cpu().load(path, options).close()
    return path


def in_turn(acts: tuple[Callable[[int], Any], Callable[[int], Any]], n_runs: int) -> list[float]:
    """Return the medians of two calls' milliseconds, run in turn; a call gets the number of its run."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for run in range(n_runs):
        for act, found in zip(acts, seconds, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            act(run)
            found.append(time.perf_counter() - start)
    return [1000 * statistics.median(found) for found in seconds]


def measure(path: Path, options: LoadOptions, n_runs: int) -> dict[str, Any]:
    """Return the figures."""
    n_threads = options.n_threads or usable_cores()
    figures: dict[str, Any] = {"threads": n_threads, "file_gb": path.stat().st_size / 1e9}
    with Cpu().load(path, options) as ours, LlamaCpp().load(path, options) as theirs:
        sessions = [model.session(N_PAST + BATCHES[-1]) for model in (ours, theirs)]
        ids = np.random.default_rng(1).integers(260, N_VOCAB, (n_runs + 1, N_PREFILL + BATCHES[-1])).astype(np.int32)

        def act(which: int, n_past: int, n: int) -> Callable[[int], Any]:
            def forward(run: int) -> None:
                sessions[which].forward(ids[run + bool(n_past), :n], n_past=n_past, rows="all" if n_past else "last")

            return forward

        pair = in_turn((act(0, 0, N_PREFILL), act(1, 0, N_PREFILL)), 3)
        figures["prefill_tok_s"] = [1000 * N_PREFILL / ms for ms in pair]
        figures["bandwidth_gb_s"] = read_bandwidth(n_threads) / 1e9
        for n in BATCHES:
            figures[f"T({n})"] = in_turn((act(0, N_PAST, n), act(1, N_PAST, n)), n_runs)
        figures["experts"] = experts_of(ours)
    times = {n: figures[f"T({n})"] for n in BATCHES}
    figures["T(1) ours / llama.cpp"] = times[1][0] / times[1][1]
    figures["T(8) / T(1)"] = [many / one for many, one in zip(times[8], times[1], strict=True)]
    return figures


def capped(options: LoadOptions, share: float, *, favourites: bool, n_rounds: int = 9) -> dict[str, Any]:
    """Return what a step takes with a share of the weights in memory, in milliseconds, and what the plan says.

    Disks of virtual machines change their pace from minute to minute, so the plan measures it again before each round
    of 20 steps. The figures are medians of the rounds.
    """
    path, n_warm, n_steps = model_path(), 130, 20  # all slots are in use after the first steps
    gguf, network = read_gguf(path), read_network(read_gguf(path))
    job = tile_job(gguf, network, options)
    resident_bytes = int(job.n_bytes * share)
    plan = stream_plan(job, network, resident_bytes)
    tiles = known_tile_file(job)
    assert plan is not None
    assert plan.experts is not None
    assert tiles is not None
    rng, ranks = np.random.default_rng(2), 1 / np.arange(1, 2001)
    n_all = n_warm + n_rounds * n_steps
    frequent, even = 300 + rng.choice(2000, n_all, p=ranks / ranks.sum()), rng.integers(260, N_VOCAB, n_all)
    ids = (frequent if favourites else even).astype(np.int32)
    rounds = []
    with Cpu().load(path, replace(options, resident_bytes=resident_bytes)) as model:
        assert isinstance(model, CpuModel)
        memory, session = plan.memory_rate(options.n_threads or usable_cores()), model.session(n_all)
        for i in range(n_warm):
            session.forward(ids[i : i + 1], n_past=i)
        counts = model.expert_reads()
        for begin in range(n_warm, n_all, n_steps):
            pace = Pace(scattered_rate(tiles, plan.experts.read_bytes, plan.experts.n_missing), memory)
            before, start = model.streamed_bytes(), time.perf_counter()
            for i in range(begin, begin + n_steps):
                session.forward(ids[i : i + 1], n_past=i)
            step_s, read = (time.perf_counter() - start) / n_steps, (model.streamed_bytes() - before) / n_steps
            planned_s = plan.seconds_per_token(pace)
            rounds.append((1000 * step_s, 1000 * planned_s, step_s / planned_s, read / 1e6, pace.disk / 1e6))
        found = model.expert_reads()
    names = ("step_ms", "planned_ms", "step / planned", "read_mb", "disk_mb_s")
    ratios = [row[2] for row in rounds]
    return {
        "share in memory": share,
        "favourites": favourites,
        **dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True)),
        "step / planned, lowest and highest": [min(ratios), max(ratios)],
        "planned_mb": plan.missing_bytes / 1e6,
        "memory_gb_s": memory / 1e9,
        "experts_in_memory": (found.present - counts.present) / (found.n_chosen - counts.n_chosen),
    }


def experts_of(model: Model) -> dict[str, float]:
    """Return the mean number of experts that a layer's rows went through, by rows of a forward."""
    touched = getattr(model, "experts_touched", None)
    return {} if touched is None else {str(n): round(mean, 1) for n, mean in touched().items() if n in BATCHES}


def main() -> int:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="only write the model and make its tiles")
    parser.add_argument("--gemma4", action="store_true", help="the synthetic Gemma 4")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=25, help="runs of each figure (default: 25)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    options = LoadOptions(n_ctx=512, n_threads=arguments.threads, max_rows=16, cache_dir=cache_folder())
    path = prepare(options, gemma4=arguments.gemma4)
    if arguments.prepare:
        return 0
    found = {"benchmark": "gemma4" if arguments.gemma4 else "moe"} | measure(path, options, arguments.runs)
    cases = () if arguments.gemma4 else ((0.5, False), (0.85, False), (0.5, True))
    found["capped"] = [capped(options, share, favourites=favourites) for share, favourites in cases]
    report(found, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
