"""Opt-in verification rules: the same distribution, not the same text.

The default, `edgedec.verification.coupled.verify_coupled`, gives the same text for any draft, and asks nothing of the
drafter. These rules give each text with the target's probability, accept more tokens, and are exact only for drafts
that were drawn as they assume:

| rule | the draft that it assumes | what happens to another draft |
|---|---|---|
| tokenwise | a chain | a tree is verified by recursive, of which this is the case of a chain |
| block | a chain, drawn with fresh random numbers in every step | a tree is verified by recursive |
| recursive | a tree; siblings that share a q are drawn without replacement | |
| kseq | K independent paths side by side | |
| multipath | K independent paths side by side, drawn with fresh random numbers in every step | block verifies a chain |

Fresh means that no earlier step's draft used the same random number, not even for a token that was rejected: key the
numbers by the position of the step and the depth of the node, not by the position of the token. Under every rule a node
may have been looked up instead of drawn; its q is then None.
"""

from collections.abc import Mapping

from edgedec.verification.block import verify_block
from edgedec.verification.contract import Rule, TargetRow, Uniform
from edgedec.verification.kseq import verify_kseq
from edgedec.verification.multipath import verify_multipath
from edgedec.verification.recursive import verify_recursive
from edgedec.verification.uniform import uniform_source

RULES: Mapping[str, Rule] = {
    "tokenwise": verify_recursive,
    "block": verify_block,
    "recursive": verify_recursive,
    "kseq": verify_kseq,
    "multipath": verify_multipath,
}

__all__ = ["RULES", "Rule", "TargetRow", "Uniform", "uniform_source"]
