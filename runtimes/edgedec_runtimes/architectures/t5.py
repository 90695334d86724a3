"""T5 (Raffel et al. 2020, arXiv:1910.10683) and its kin (flan-t5): an encoder reads a text, a decoder writes another.

Positions are not rotated: each head adds a number to a score, by the range that the distance of query and key is in.
Scores are not scaled. A file has `enc.blk.0.` to the last layer of the encoder, and `dec.blk.0.` and so on, of which
each is two layers here: one sees the text, the other one the source. What the second one reads of the encoder's output
is a layer of its own, too, as its rows are those of the source: all of these stand behind the encoder's layers.
"""

import re
from dataclasses import replace
from types import MappingProxyType

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec_runtimes.architectures.architecture import DISTANCE_BIAS, INPUT_NORMS, Architecture, Switches, plain
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.shared.hyperparameters import CROSS, DECODER, ENCODER, MEMORY, Hyperparameters, LayerShape

KEYS = frozenset({"attention.layer_norm_epsilon", "attention.relative_buckets_count"})
_LAYER = re.compile(r"(enc|dec)\.blk\.(\d{1,4})\.(.+)")


def _layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the layers: the encoder's, the memories, and for each layer of the decoder one that sees each of two."""
    header.number("decoder_start_token_id")  # which the tokenizer puts behind prompts
    shape, n_encoder, tensors = header.hyper.layers[0], header.hyper.n_layer, header.gguf.tensors
    n_decoder = len({match[2] for name in tensors if (match := _LAYER.fullmatch(name)) and match[1] == "dec"})
    _require_count(header, "layers of a decoder", n_decoder, "decoder_block_count")
    layers = [*encoder_layers(header)]
    memory = replace(shape, n_ff=0, is_mixer=True, role=MEMORY)
    layers += [replace(memory, kv_from=n_encoder + number) for number in range(n_decoder)]
    for number in range(n_decoder):
        layers.append(replace(memory, kv_from=len(layers), role=DECODER))
        layers.append(replace(shape, kv_from=n_encoder + number, role=CROSS))
    return tuple(layers)


def encoder_layers(header: Header) -> tuple[LayerShape, ...]:
    """Return the encoder's layers."""
    table = header.gguf.tensors.get(f"enc.blk.0.{DISTANCE_BIAS}")
    n_ranges = 0 if table is None else table.shape[-1]
    _require_count(header, "ranges of distances", n_ranges, "attention.relative_buckets_count")
    shape = header.hyper.layers[0]
    return tuple(replace(shape, kv_from=number, role=ENCODER) for number in range(header.hyper.n_layer))


def _require_count(header: Header, what: str, n: int, key: str) -> None:
    """Raise ModelFormatError where the tensors are of another number of something than the metadata says."""
    if not 1 <= n == (said := header.whole(key, n)):
        path = header.gguf.paths[0]
        raise ModelFormatError(f"{path}: its tensors are of {n} {what}, expected {said or 1}; download it again")


def _switches(header: Header) -> Switches:
    """Return the switches; the first T5 has no gates, and multiplies by its embeddings' matrix in place of a head's."""
    tensors, is_gated = header.gguf.tensors, "enc.blk.0.ffn_gate.weight" in header.gguf.tensors
    return replace(
        plain(header),
        attention_scale=1.0,
        unrotated=(True,) * header.hyper.n_layer,
        activation="gelu" if is_gated else "relu",
        ungated=not is_gated,
        logit_scale=1.0 if "output.weight" in tensors else header.hyper.n_embd**-0.5,
    )


def _placed(gguf: GGUF, hyper: Hyperparameters) -> GGUF:
    """Return a header with the tensors of layers; those of distances in the first one are those of all."""
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        for other in _places(name, hyper):
            tensors[other] = replace(tensor, name=other)
    return gguf if tensors.keys() == gguf.tensors.keys() else replace(gguf, tensors=MappingProxyType(tensors))


def _places(name: str, hyper: Hyperparameters) -> list[str]:
    """Return the names of a tensor as that of layers; none where no layer reads it."""
    of_role: dict[str, list[int]] = {role: [] for role in (ENCODER, MEMORY, DECODER, CROSS)}
    for number, layer in enumerate(hyper.layers):
        of_role[layer.role].append(number)
    if name == "enc.output_norm.weight":
        return [f"blk.{number}.attn_norm.weight" for number in of_role[MEMORY]] or ["output_norm.weight"]
    if (match := _LAYER.fullmatch(name)) is None:
        return [name.removeprefix("dec.") if name == "dec.output_norm.weight" else name]
    number, short = int(match[2]), match[3]
    role = ENCODER if match[1] == "enc" else CROSS if short.startswith(("cross_", "ffn_")) else DECODER
    if short in ("cross_attn_k.weight", "cross_attn_v.weight"):
        role = MEMORY
    if short == "cross_attn_rel_b.weight":
        return []
    if short == DISTANCE_BIAS and number == 0:
        return [f"blk.{layer}.{short}" for layer in of_role[role]]
    short = short.removeprefix("cross_").replace("attn_o.weight", "attn_output.weight")
    return [f"blk.{of_role[role][number]}.{short}"] if number < len(of_role[role]) else [name]


T5 = Architecture(
    _switches,
    keys=KEYS | {"decoder_block_count", "decoder_start_token_id"},
    needed=INPUT_NORMS | {DISTANCE_BIAS},
    layers=_layers,
    placed=_placed,
)
