"""Nanbeige 4 with loops: a Llama whose layers run several times, each time with keys and values of their own."""

from dataclasses import replace

from edgedec_runtimes.architectures.architecture import Architecture, Switches
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.llama import LLAMA


def _switches(header: Header) -> Switches:
    n_blocks = header.hyper.n_layer // int(header.number("num_loops"))
    is_normed = not header.flag("skip_loop_final_norm", default=False)
    return replace(LLAMA.switches(header), norm_period=n_blocks if is_normed else 0)


NANBEIGE = Architecture(
    _switches,
    keys=LLAMA.keys | {"attention.head_dim", "num_loops", "skip_loop_final_norm"},
    vectors=LLAMA.vectors,
)
