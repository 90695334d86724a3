"""llama.cpp to compare with: the llamacpp runtime without drafts, and llama-cpp-python's own prompt lookup.

Prompt lookup is Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding), in the binding as
LlamaPromptLookupDecoding with its defaults: n-grams of up to 2 tokens, drafts of up to 10.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from edgedec.progress import CancelToken
from edgedec.tokenizer import Tokenizer
from edgedec_apps.bench.measure import Run, Runner
from edgedec_apps.bench.prompts import BenchRequest
from edgedec_runtimes.llamacpp.library import chosen, llama
from edgedec_runtimes.llamacpp.trial import repack_complaint

LLAMACPP, LOOKUP = "llama.cpp", "llama.cpp, prompt lookup"
_CONTEXT_STEP = 256
_MOST_ROW_BYTES = 2 << 30


def open_lookup(
    path: Path, requests: Sequence[BenchRequest], tokenizer: Tokenizer, *, max_tokens: int, n_threads: int, n_vocab: int
) -> tuple[Runner, Callable[[], None]] | str:
    """Open a GGUF for greedy decoding with the binding's prompt lookup; return its runner and what closes it.

    Where that fails, the reason is returned as a text. The context has the length of the longest request, as the
    binding keeps a row of logits, f32[n_vocab], for each of its tokens.
    """
    longest = max(len(request.token_ids) for request in requests)
    n_ctx = -(-(longest + max_tokens + 16) // _CONTEXT_STEP) * _CONTEXT_STEP
    n_bytes = n_ctx * n_vocab * 4
    if n_bytes > _MOST_ROW_BYTES:
        return f"llama-cpp-python would keep {n_bytes / 1e6:.0f} MB of logits for {n_ctx} tokens of context"
    if (crash := repack_complaint()) is not None:
        return f"llama-cpp-python always rearranges weights, whose kernels can't be used here: {crash}"
    try:
        llama()  # checks the library's version, and redirects its log
        if chosen().package != "llama_cpp":
            return f"llama-cpp-python's prompt lookup does not run on the library of {chosen()}"
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        model = Llama(
            str(path),
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            draft_model=LlamaPromptLookupDecoding(),
            verbose=False,
        )
    except Exception as error:  # an optional library may raise any error
        return f"llama-cpp-python's prompt lookup does not open the model ({type(error).__name__}: {error})"
    return _lookup_runner(model, tokenizer, max_tokens), model.close


def _lookup_runner(model: Any, tokenizer: Tokenizer, max_tokens: int) -> Runner:
    def run(request: BenchRequest, cancel: CancelToken) -> Run | None:
        model.reset()  # so that no prefix of the run before is reused
        token_ids: list[int] = []
        first_token_s = 0.0
        started = perf_counter()
        stream = model.generate(list(request.token_ids), temp=0.0)
        for token_id in stream:
            first_token_s = first_token_s or perf_counter() - started
            if cancel.cancelled:
                return None
            if tokenizer.is_end(token_id):
                break
            token_ids.append(int(token_id))
            if len(token_ids) == max_tokens:
                break
        total_s = perf_counter() - started
        stream.close()
        return Run(tuple(token_ids), first_token_s, total_s)

    return run
