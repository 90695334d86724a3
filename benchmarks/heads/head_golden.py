"""Compare the numpy draft head with drafts that somebody else's implementation made.

    python benchmarks/heads/head_golden.py HEAD TARGET.gguf GOLDEN.npz

GOLDEN.npz holds `prompt` and `answer` (token ids), `taps` [T, n_taps * n_embd] of the text, `fused` [T, n_embd], and
for each `position` [P] the chain that was drafted after the pair (taps of that position, the next token): `draft`
[P, K], `top8_token` and `top8_logit` [P, K, 8], `accepted` [P]. The exit status is 1 where a logit is off by more than
2 % of the largest, or a draft differs although its two best logits differ by more than that. HEAD may be quantized;
then only the accepted tokens a step are meant to agree.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.heads.reference_head import ReferenceHead

from edgedec.gguf.file import read_gguf
from edgedec_export.target_rows import embedding_rows, output_name, read_rows
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

TOLERANCE = 0.02


def main(head_path: str, target_path: str, golden_path: str) -> int:
    """Print the comparison; return the exit status."""
    target = read_gguf(target_path)
    fitted = fit(load_head(head_path), target)
    for note in fitted.notes:
        print("note:", note)
    head, golden = fitted.head, np.load(golden_path)
    output = read_rows(target, output_name(target), head.d2t)
    text = [*golden["prompt"].tolist(), *golden["answer"].tolist()]
    reference = ReferenceHead(head, embedding_rows(target), output)
    fused = reference.fuse(golden["taps"])
    off = np.abs(fused - golden["fused"]).max() / np.abs(golden["fused"]).max()
    print(f"fused: off by at most {off:.2e} of the largest")
    rank = np.full(head.card.n_vocab_target, -1)
    rank[head.d2t] = np.arange(len(head.d2t))
    worst, n_same, n_near, n_wrong, accepted = 0.0, 0, 0, 0, []
    for i, position in enumerate(golden["position"].tolist()):
        n_known = position + 1
        reference.absorb(golden["taps"][len(reference.features) : n_known])
        drafted, logits = reference.draft(text[: n_known + 1], golden["draft"].shape[1])
        accepted.append(_accepted(drafted, text[n_known + 1 :]))
        for k, token in enumerate(drafted):
            best = golden["top8_logit"][i, k]
            largest = np.abs(best).max()
            worst = max(worst, float(np.abs(logits[k, rank[golden["top8_token"][i, k]]] - best).max() / largest))
            if token == golden["draft"][i, k]:
                n_same += 1
                continue
            near = best[0] - best[1] <= TOLERANCE * largest
            n_near, n_wrong = n_near + near, n_wrong + (not near)
            break  # from here on the two draft after different tokens
    print(f"logits: off by at most {worst:.2%} of the largest")
    print(f"drafts: {n_same} tokens the same, {n_near} different in near-ties, {n_wrong} different")
    mean, given = np.mean(accepted) + 1, np.mean(golden["accepted"]) + 1
    print(f"tokens a step: {mean:.3f}, golden {given:.3f} ({mean / given - 1:+.1%})")
    return int(n_wrong > 0 or worst > TOLERANCE)


def _accepted(drafted: list[int], text: list[int]) -> int:
    n = 0
    while n < min(len(drafted), len(text)) and drafted[n] == text[n]:
        n += 1
    return n


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
