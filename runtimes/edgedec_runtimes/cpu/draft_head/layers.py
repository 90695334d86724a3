"""The layers of a draft head that joins pairs: those of a model of the target's kind, with tiles of their own."""

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from edgedec.gguf.file import GGUF
from edgedec.load_options import LoadOptions
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.cpu.library import native
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.cpu.tensor_places import EMBEDDING, OUTPUT
from edgedec_runtimes.cpu.tiles.cache import Job
from edgedec_runtimes.cpu.weights import tile_job


class HeadLayers(NamedTuple):
    """The layers of a head.

    Attributes:
        gguf: Their header.
        network: Their network; `n_vocab` counts the tokens that the head drafts.
        job: Makes their tiles, in memory.
    """

    gguf: GGUF
    network: Network
    job: Job


def read_layers(gguf: GGUF, n_vocab: int) -> HeadLayers:
    """Return the layers that the header of a model of the head's layers describes (raises what read_network raises)."""
    whole = read_network(gguf)
    matrices = tuple(placed for placed in whole.matrices if placed.which not in (EMBEDDING, OUTPUT))
    network = replace(whole, n_vocab=n_vocab, matrices=matrices)
    return HeadLayers(usual_tensors(gguf, network), network, tile_job(gguf, network, LoadOptions()))


def bytes_of_token(network: Network) -> int:
    """Return the bytes of tiles that a drafted token reads of the layers: of experts, those that it goes through."""
    total = Fraction(0)
    for tensor in (placed.tensor for placed in network.matrices):
        n_bytes = native().ec_tile_bytes(tensor.type, tensor.shape[1], tensor.shape[0])
        total += n_bytes * (Fraction(network.n_expert_used, network.n_expert) if "_exps." in tensor.name else 1)
    return int(total)
