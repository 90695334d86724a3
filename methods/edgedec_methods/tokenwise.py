"""Token-wise rejection: each token of a drawn chain is accepted with min(1, p / q), or drawn anew from the rest of p.

It is recursive rejection (edgedec.verification.recursive) with drafts that are chains.

Paper: Leviathan et al. 2023, arXiv:2211.17192
Option: `--verify tokenwise`
For: comparing rules that keep the distribution, not the text
Measured: 45.0 tokens/s with a head at temperature 1, where `coupled` has 54.2 (`python
    benchmarks/studies/drawn_trees.py qwen2.5-coder-1.5b --rows 6 --per-task 1 --max-tokens 40 --draft-head HEAD`)
Status: study
"""

from edgedec.verification.recursive import verify_recursive
from edgedec.verification.rules import Rule

RULE = Rule(verify_recursive)
