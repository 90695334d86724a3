"""BlockFFN (arXiv:2507.08771): a MiniCPM with small experts, of which a token goes through those that score above 0.

A router's scores go through ReLU and a norm over all experts; there is no softmax and no fixed number of experts. An
expert has no gate: down(silu(up(x))). What the rows of a verification have in common is read once: the union of their
experts. The published networks that have attention with keys and values of heads run so; those with latent attention
(MLA) are refused, as their files have other tensors.

llama.cpp has no such architecture, so the names of keys and tensors are ours: those of a MiniCPM with experts, and
`ffn_gate_inp_norm.weight`, the weight of the router's norm.
"""

from dataclasses import replace

from edgedec.errors import ModelFormatError
from edgedec_runtimes.architectures.architecture import INPUT_NORMS, Architecture, Switches
from edgedec_runtimes.architectures.experts import mixed
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.minicpm import MINICPM

_ROUTER_NORM, _SCALES = "ffn_gate_inp_norm.weight", "ffn_down_exps.scale"


def _switches(header: Header) -> Switches:
    n_expert, n_used = header.info.n_expert, header.info.n_expert_used
    if not n_expert or n_used != n_expert:
        raise ModelFormatError(
            f"{header.gguf.paths[0]}: blockffn.expert_used_count is {n_used} of {n_expert} experts, expected all of "
            "one or more, as a token may go through any number of them"
        )
    start = replace(MINICPM.switches(header), ungated=True)
    return mixed(header, start, normed=False, gating="relu")


BLOCKFFN = Architecture(
    _switches,
    keys=MINICPM.keys | {"expert_count", "expert_used_count", "expert_feed_forward_length"},
    vectors=MINICPM.vectors,
    needed=INPUT_NORMS | {_SCALES},
    renamed={_ROUTER_NORM: _SCALES},
)
