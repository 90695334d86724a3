"""Measure what a draft head accepts by the kind of prompt, and write the record that promises it.

    python benchmarks/heads/head_promise.py MODEL HEAD --per-task 4 -n 160 --name NAME -o HEAD-FOLDER/edgedec-head.json

The model writes each answer greedily on the cpu runtime, one token at a time, and before each token the head drafts a
chain of 6. A chain counts where a step would begin one: after the token that follows an accepted draft. The line
of each kind is tokens a step and the chance that a draft is right up to its first, second, ... token, which is what the
record's `reach` means (docs/heads.md). HEAD is a GGUF or a checkpoint's folder; `edgedec export --to gguf` copies the
record from the folder of a checkpoint into the GGUF.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions, ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgedec_export.training.simulation import Drafted, reach, replay
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import Promise
from edgedec_runtimes.trained_heads.record import record_text
from edgedec_runtimes.trained_heads.target import target_of

N_CTX = 2048
MOST_DRAFTED = 6


def drafted(session: Session, kind: str, prompt: Sequence[int], n_tokens: int) -> Drafted:
    """Return what the session's head drafts after each token of the model's greedy answer."""
    head = session.draft_head
    assert head is not None, "the options name a head"
    is_end = session.model.tokenizer.is_end
    logits = session.forward(np.array(prompt, np.int32), n_past=0).logits[-1]
    answer = [int(logits.argmax())]
    chains = []
    while len(answer) < n_tokens and not is_end(answer[-1]):
        n_past = len(prompt) + len(answer) - 1
        chains.append(head.chain(n_past, answer[-1], ChainRules(MOST_DRAFTED)))
        answer.append(int(session.forward(np.array(answer[-1:], np.int32), n_past=n_past).logits[-1].argmax()))
    right = np.zeros((len(chains), MOST_DRAFTED), np.bool_)
    sure = np.zeros((len(chains), MOST_DRAFTED), np.float32)
    for i, chain in enumerate(chains):
        for k, (token, p) in enumerate(zip(chain.tokens, chain.p, strict=True)):
            right[i, k] = i + 1 + k < len(answer) and token == answer[i + 1 + k]
            sure[i, k] = p
    return Drafted(kind, right, sure)


def main() -> None:
    """Print a line for each kind of prompt, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target: a path or a name")
    parser.add_argument("head", type=Path, help="a GGUF or a folder")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="a file of prompts, as of edgedec bench")
    parser.add_argument("--per-task", type=int, default=4, help="prompts of each task (default: 4)")
    parser.add_argument("-n", "--n-tokens", type=int, default=160, help="tokens of each answer (default: 160)")
    parser.add_argument("--name", default="", help="the head's name in the record (default: the name of its file)")
    parser.add_argument("-o", "--out", type=Path, help="the record to write")
    options = parser.parse_args()
    texts: list[Drafted] = []
    model = resolve(options.model, ResolveOptions())
    with edgedec.load(model, runtime="cpu", draft="off", n_ctx=N_CTX) as engine:
        prompts = [
            (prompt.task, engine.chat_ids([{"role": "user", "content": prompt.text}]))
            for prompt in read_prompts(options.prompts, options.per_task)
        ]
    load = LoadOptions(n_ctx=N_CTX, draft_head=options.head, cache_dir=cache_folder())
    with Cpu().load(model, load) as loaded:
        for kind, ids in prompts:
            if len(ids) + options.n_tokens <= N_CTX:
                session = loaded.session(N_CTX)
                texts.append(drafted(session, kind, ids, options.n_tokens))
                session.close()
    by_kind = {}
    for kind in [*dict.fromkeys(text.kind for text in texts), "all"]:
        of_kind = [text for text in texts if kind in (text.kind, "all")]
        by_kind[kind] = tuple(round(chance, 4) for chance in reach(of_kind, MOST_DRAFTED))
        n_tokens = sum(len(text.right) for text in of_kind)
        gained = replay(of_kind, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
        print(f"{kind}: {gained:.2f} tokens a step, {n_tokens} tokens, reach {by_kind[kind]}", flush=True)
    if options.out is not None:
        promise = Promise(by_kind.pop("all"), by_kind)
        name = options.name or options.head.name
        options.out.write_text(record_text(name, target_of(read_gguf(model)), promise) + "\n")


if __name__ == "__main__":
    main()
