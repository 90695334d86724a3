"""Compare edgedec's plain greedy decoding on the llamacpp runtime with a bare llama.cpp loop.

Both sides use the same file, context, batch 2,048, micro-batch 512, automatic flash attention, f16 KV and threads. The
token ids must be equal; the speed is compared side by side in one process, the two taking turns to go first, as the
ratio of tokens per second after the first token, prompt by prompt, and of the time to the first token.

    python benchmarks/texts/llamacpp_parity.py --prompts prompts.jsonl smollm2-135m qwen2.5-coder-0.5b

Ends with one line of JSON; exit status 1 when a token differs.
"""

import argparse
import ctypes
import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from prompts import load_prompts

import edgedec
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_runtimes.llamacpp.library import version
from edgedec_runtimes.llamacpp.trial import repack_complaint
from edgedec_runtimes.shared.cpu_count import usable_cores


@dataclass(frozen=True)
class Run:
    """Tokens and times of one generation."""

    token_ids: tuple[int, ...]
    first_token_s: float
    tokens_per_s: float


class BareLoop:
    """The shortest greedy loop that llama.cpp's API allows."""

    def __init__(self, path: Path, n_ctx: int, n_threads: int) -> None:
        from llama_cpp import llama_cpp

        self.api: Any = llama_cpp
        model_params = self.api.llama_model_default_params()
        model_params.use_extra_bufts = repack_complaint() is None
        self.model = self.api.llama_model_load_from_file(str(path).encode(), model_params)
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 2048, 512
        params.n_threads = params.n_threads_batch = n_threads
        self.context = self.api.llama_init_from_model(self.model, params)
        self.vocab = self.api.llama_model_get_vocab(self.model)
        self.n_vocab = self.api.llama_vocab_n_tokens(self.vocab)
        self.sampler = self.api.llama_sampler_init_greedy()

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        """Decode greedily until an end token or `max_tokens`."""
        api, started = self.api, time.perf_counter()
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        for start in range(0, len(prompt), 2048):
            piece = prompt[start : start + 2048]
            tokens = (ctypes.c_int32 * len(piece))(*piece)
            assert api.llama_decode(self.context, api.llama_batch_get_one(tokens, len(piece))) == 0
        generated: list[int] = []
        first = 0.0
        while True:
            token = api.llama_sampler_sample(self.sampler, self.context, -1)
            first = first or time.perf_counter()
            if api.llama_vocab_is_eog(self.vocab, token):
                break
            generated.append(token)
            if len(generated) == max_tokens:
                break
            one = (ctypes.c_int32 * 1)(token)
            assert api.llama_decode(self.context, api.llama_batch_get_one(one, 1)) == 0
        seconds = time.perf_counter() - first
        return Run(tuple(generated), first - started, (len(generated) - 1) / seconds if len(generated) > 1 else 0.0)

    def close(self) -> None:
        """Free everything."""
        self.api.llama_sampler_free(self.sampler)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def ours(engine: edgedec.Engine, prompt: list[int], max_tokens: int) -> Run:
    """Generate through the public API, from a cold KV cache."""
    engine.generate([prompt[0] ^ 1], max_tokens=1, temperature=0)  # a different first token: nothing to reuse
    result = engine.generate(prompt, max_tokens=max_tokens, temperature=0)
    assert result.stats.n_reused_tokens == 0
    return Run(result.token_ids, result.stats.first_token_s, result.stats.tokens_per_s)


def compare(name: str, prompts: list[str], max_tokens: int, n_ctx: int, n_threads: int) -> dict[str, Any]:
    """Run both sides over all prompts and return the figures."""
    path = resolve(name, ResolveOptions())
    bare = BareLoop(path, n_ctx, n_threads)
    differing, speed, first, tokens_per_s = 0, [], [], []
    with edgedec.load(path, runtime="llamacpp", n_ctx=n_ctx, n_threads=n_threads) as engine:
        for index, text in enumerate(prompts):
            prompt = engine.chat_ids([{"role": "user", "content": text}]) if engine.can_chat else []
            prompt = (prompt or engine.tokenizer.encode(text))[: n_ctx - max_tokens - 1]
            if index % 2:
                b = ours(engine, prompt, max_tokens)
                a = bare.generate(prompt, max_tokens)
            else:
                a = bare.generate(prompt, max_tokens)
                b = ours(engine, prompt, max_tokens)
            differing += a.token_ids != b.token_ids
            if a.tokens_per_s and b.tokens_per_s:
                speed.append(b.tokens_per_s / a.tokens_per_s)
                tokens_per_s.append(b.tokens_per_s)
            first.append(b.first_token_s / a.first_token_s)
            print(
                f"{name} {index + 1}/{len(prompts)}: {len(prompt)} + {len(b.token_ids)} tokens, "
                f"{'equal' if a.token_ids == b.token_ids else 'DIFFERENT'}, "
                f"{b.tokens_per_s:.1f} against {a.tokens_per_s:.1f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    bare.close()
    return {
        "n_prompts": len(prompts),
        "n_differing": differing,
        "tokens_per_s": round(median(tokens_per_s), 2),
        "speed_ratio_median": round(median(speed), 4),
        "speed_ratio_range": [round(min(speed), 4), round(max(speed), 4)],
        "first_token_ratio_median": round(median(first), 4),
    }


def main() -> int:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=usable_cores())
    args = parser.parse_args()
    prompts = load_prompts(args.prompts, args.count)
    results = {name: compare(name, prompts, args.max_tokens, args.context, args.threads) for name in args.models}
    for name, result in results.items():
        print(f"{name:22} " + "  ".join(f"{key} {value}" for key, value in result.items()))
    document = {"models": results, "threads": args.threads, "llamacpp": version(), "machine": platform.processor()}
    print(json.dumps(document))
    return 1 if any(result["n_differing"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
