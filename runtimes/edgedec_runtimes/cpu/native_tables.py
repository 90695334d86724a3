"""What Python and the native library share: names for numbers, and structures. Each is written here only.

native/CMakeLists.txt runs this file, which writes native/edgedec_cpu.h's edgedec_tables.h; library.py makes ctypes
structures of the same tables, and compares when it loads the library.
"""

import ctypes
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTERFACE = 32
"""The version of the functions, raised when one of them changes."""

# The names of each table have the numbers from 0 on.
_NAMES = {
    "results": "EC_OK EC_INVALID EC_NO_MEMORY EC_CANCELLED EC_UNREADABLE EC_NOT_FINITE",
    # The matrices of a model; those from EC_Q on exist in each layer. A layer with a mixture of experts has EC_ROUTER
    # and the matrices of its experts, in each of which expert e is the rows from e * n_rows / n_expert on; its EC_GATE,
    # EC_UP and EC_DOWN are those of a shared expert, which all rows go through, and may be absent. Without
    # EC_UP_EXPERTS, the rows of each expert in EC_GATE_EXPERTS are those of its gate and then those of its up. A layer
    # without EC_V has its keys, before their norm, as values.
    "matrices": """
        EC_TOKEN_EMBD EC_OUTPUT EC_Q EC_K EC_V EC_ATTN_OUT EC_GATE EC_UP EC_DOWN
        EC_ROUTER  # [n_expert][n_embd]
        EC_SHARED_ROUTER  # [1][n_embd], the score whose sigmoid multiplies the shared expert's output; may be absent
        EC_GATE_EXPERTS EC_UP_EXPERTS EC_DOWN_EXPERTS
        # What layers get of a token (n_per_layer): the first two exist once, the others in each layer.
        EC_PER_LAYER_ROWS  # [n_vocab * n_layer][n_per_layer], of which a forward reads n_layer rows for a token
        EC_PER_LAYER_PROJECTION  # [n_layer * n_per_layer][n_embd]
        EC_PER_LAYER_GATE  # [n_per_layer][n_embd]
        EC_PER_LAYER_OUT  # [n_embd][n_per_layer]
        # Those of a layer with a recurrent state. EC_MIX: [2 * n_state_key_head * n_state_key + n_state_head *
        # n_state_value][n_embd], what the convolution goes over: queries, keys, values; by EC_RULE_SPACE values, keys,
        # queries
        EC_MIX
        EC_MIX_GATE  # [n_state_head * n_state_value][n_embd], whose SiLU multiplies the result
        # [n_state_head][n_embd], of how much of the state is kept; by EC_RULE_DELTA without EC_MIX_BETA twice as many
        # rows, those of a key head together: of its heads' beta, then of their alpha
        EC_MIX_ALPHA
        EC_MIX_BETA  # [n_state_head][n_embd], of how much is learned (EC_RULE_DELTA)
        EC_MIX_OUT  # [n_embd][n_state_head * n_state_value]
        EC_N_MATRICES
    """,
    # The vectors of a model (float32). Those from EC_ATTN_NORM on exist in each layer; all of these may be absent.
    "vectors": """
        EC_OUTPUT_NORM EC_ATTN_NORM EC_FFN_NORM EC_Q_BIAS EC_K_BIAS EC_V_BIAS EC_Q_NORM EC_K_NORM EC_POST_ATTN_NORM
        EC_POST_FFN_NORM
        EC_EMBEDDING_NORM  # of a draft head's layer
        EC_ATTN_OUT_BIAS  # [n_embd]
        EC_SINKS  # [n_head], a score of each head that has a part in the softmax and no value
        EC_EXPERT_BIAS  # [n_expert], added to the gates of experts only to choose them
        # [n_embd][length], the kernels of a layer with a short convolution (gated: LFM2) in place of attention: EC_Q,
        # EC_K and EC_V are then C, B and x, of n_embd rows each, and C * conv(B * x) goes to EC_ATTN_OUT; of a layer
        # with a recurrent state [rows of EC_MIX][length]
        EC_CONVOLUTION
        EC_ROUTER_BIAS  # [n_expert], of the scores of experts
        EC_GATE_EXPERTS_BIAS  # [n_expert][n_ff_expert]
        EC_UP_EXPERTS_BIAS  # the same
        EC_DOWN_EXPERTS_BIAS  # [n_expert][n_embd]
        EC_PER_LAYER_NORM  # [n_per_layer], of each layer's part of EC_PER_LAYER_PROJECTION; exists once
        EC_PER_LAYER_POST_NORM  # behind EC_PER_LAYER_OUT
        EC_LAYER_SCALE  # [1], what the hidden state is multiplied by behind the layer
        EC_ROUTER_NORM  # before the router, and the next one before experts, where they don't read what EC_GATE does
        EC_EXPERTS_NORM
        EC_POST_SHARED_NORM  # behind the shared expert, and the next one behind the experts, before they are added
        EC_POST_EXPERTS_NORM
        EC_EXPERT_SCALES  # [n_expert], what the gates of experts are multiplied by
        EC_STATE_BIAS  # [n_state_head], added to alpha
        EC_STATE_RATE  # [n_state_head], at most 0: e^(rate * softplus(alpha)) of the state is kept
        # [n_state_value], of each head of the result; by EC_RULE_SPACE [n_state_head * n_state_value], a norm over the
        # heads of a key together, which may be absent
        EC_STATE_NORM
        EC_CONVOLUTION_BIAS  # [rows of EC_MIX], this and the next of EC_RULE_SPACE
        EC_STATE_PASSED  # [n_state_head], how much of a value is added to the result
        # [n_head][2 * EC_MOST_DISTANCE + 1], what each head adds to its scores by how far a key is behind its query,
        # from -EC_MOST_DISTANCE on; a key that is farther has what the farthest one has
        EC_DISTANCE_BIAS
        EC_N_VECTORS
    """,
    # How keys and values are stored: as halves; or in groups of 32 with a half as scale, as int8, as 4 bits, or as 4
    # bits with the largest elements (one of 16) as halves beside them; or keys as int8, and values as 4 bits. All but
    # halves take a head_dim that is a multiple of 32 and at most 512.
    "KV types": "EC_KV_F16 EC_KV_INT8 EC_KV_INT4 EC_KV_GEAR EC_KV_INT8_INT4",
    # How the gates of experts come from their scores: a softmax over all experts, the sigmoid of each, a softmax over
    # those that were chosen, or the score where it is above 0, over the root of the mean of all squares.
    "gatings": "EC_GATING_SOFTMAX EC_GATING_SIGMOID EC_GATING_CHOSEN EC_GATING_RELU",
    # What a gate g becomes in a feed-forward block, before it multiplies: g * sigmoid(g), the tanh form of GELU, the
    # greater of g and 0, or the square of that.
    "activations": "EC_SILU EC_GELU EC_RELU EC_RELU2 EC_GELU_QUICK",
    # How a row changes a recurrent state: by the gated delta rule, or by that of a state space (Mamba-2), where
    # softplus of alpha is also what the value is multiplied by.
    "state rules": "EC_RULE_NONE EC_RULE_DELTA EC_RULE_SPACE",
    # What stands before the feed-forward block of a layer: nothing, attention, a short convolution, a recurrence, or
    # attention and a recurrence side by side.
    "mixers": "EC_MIXER_NONE EC_MIXER_ATTENTION EC_MIXER_CONVOLUTION EC_MIXER_RECURRENT EC_MIXER_BOTH",
    # What a layer of a model with an encoder is for (ec_item.n_source): rows of the source, each of which sees all of
    # them; their keys and values alone, of which there are no queries and no output; the rows behind the source, which
    # see one another; or the same rows, which see the source by the keys and values of an EC_ROLE_MEMORY layer.
    # Layers of an encoder, of memory and of the text keep what they store in the same places, in the order of each.
    "roles": "EC_ROLE_ALL EC_ROLE_ENCODER EC_ROLE_MEMORY EC_ROLE_DECODER EC_ROLE_CROSS EC_N_ROLES",
    # The stages of a forward that read weights.
    "stages": "EC_PART_QKV EC_PART_ATTN_OUT EC_PART_GATE_UP EC_PART_DOWN EC_PART_OUTPUT",
    # Whether an item's rows are a block: none; a block in which a row sees the rows before it, or in which all rows see
    # one another, whose windows are counted from its first row; or one in which all rows see one another, whose windows
    # are counted from each row (in models without states). A block has no parents.
    "blocks": "EC_BLOCK_NONE EC_BLOCK_CAUSAL EC_BLOCK_WHOLE EC_BLOCK_MUTUAL",
    # The matrices and vectors of a draft head. EC_DRAFT_HEAD_EMBEDDING is absent where it reads the target's
    # embeddings.
    "matrices of heads": """
        # of a layer
        EC_DRAFT_HEAD_Q EC_DRAFT_HEAD_K EC_DRAFT_HEAD_V EC_DRAFT_HEAD_ATTN_OUT EC_DRAFT_HEAD_GATE EC_DRAFT_HEAD_UP
        EC_DRAFT_HEAD_DOWN
        # [2 * conv_length * n_embd / conv_group, n_embd], where conv_length is not 0: the kernels around the attention,
        # and around the feed-forward block
        EC_DRAFT_HEAD_ATTN_KERNELS EC_DRAFT_HEAD_FFN_KERNELS
        # of the head
        EC_DRAFT_HEAD_FC EC_DRAFT_HEAD_OUTPUT EC_DRAFT_HEAD_EMBEDDING
        # [n_embd, 2 * n_embd], which reads an embedding and a feature, of a head that joins them; such a head may lack
        # EC_DRAFT_HEAD_FC: its only tap is the feature then. Where reads_target is 1, embeddings and features have the
        # target's length, and EC_DRAFT_HEAD_FC makes features of the head's own states
        EC_DRAFT_HEAD_JOINT
        EC_DRAFT_HEAD_ROWS  # [n_rows_made * n_embd, n_embd], of the state that a row is made of; may be absent
        EC_DRAFT_HEAD_MARKOV_W1  # [n_vocab of the target, rank]
        EC_DRAFT_HEAD_MARKOV_W2  # [n_vocab, rank]; [n_vocab of the target, rank] of EC_MARKOV_SELECTOR
        EC_DRAFT_HEAD_MARKOV_GATE  # [rank, n_embd + rank] of EC_MARKOV_GATED, [rank, n_embd] of EC_MARKOV_SELECTOR
        EC_DRAFT_HEAD_MARKOV_JOINT  # [3 * rank, 2 * rank + n_embd], of EC_MARKOV_RNN
        EC_DRAFT_HEAD_N_MATRICES
    """,
    "vectors of heads": """
        # of a layer
        EC_DRAFT_HEAD_EMBEDDING_NORM  # of the embeddings of pairs
        EC_DRAFT_HEAD_ATTN_NORM  # of the features of pairs, or of what a layer reads
        EC_DRAFT_HEAD_FFN_NORM
        EC_DRAFT_HEAD_Q_NORM  # [head_dim], absent where heads are not normed
        EC_DRAFT_HEAD_K_NORM
        EC_DRAFT_HEAD_ATTN_KERNELS_BASE  # [2][conv_length][n_embd], added to the kernels: before, behind the block
        EC_DRAFT_HEAD_FFN_KERNELS_BASE
        # of the head
        EC_DRAFT_HEAD_OUTPUT_NORM  # absent where no norm stands before the output matrix
        EC_DRAFT_HEAD_FC_NORM  # [n_taps * n_embd of the target], where fc_norm is not EC_FC_NORM_NONE
        EC_DRAFT_HEAD_FEATURE_NORM  # of features, for blocks and for pairs that are joined
        EC_DRAFT_HEAD_PAIR_NORM  # of embeddings, for pairs that are joined
        EC_DRAFT_HEAD_ROPE_DIVISORS
        EC_DRAFT_HEAD_ROWS_KEPT EC_DRAFT_HEAD_ROWS_BASE  # [n_rows_made * n_embd]; may be absent
        EC_DRAFT_HEAD_MASK  # the embedding of masked rows, where mask_token is -1
        EC_DRAFT_HEAD_MARKOV_GATE_BIAS EC_DRAFT_HEAD_MARKOV_JOINT_BIAS
        EC_DRAFT_HEAD_CONFIDENCE  # [n_embd + rank]; absent where the head has none
        EC_DRAFT_HEAD_CONFIDENCE_BIAS EC_DRAFT_HEAD_N_VECTORS
    """,
    # The norm before fc: none, one over all taps together, or one over each tap.
    "norms before fc": "EC_FC_NORM_NONE EC_FC_NORM_JOINED EC_FC_NORM_EACH",
    # How the scores of a row of a block depend on the token before: not at all, by the product of W2 and its row of W1
    # alone, with a gate, or with a recurrent state. A selector scores the best tokens of the row alone, and adds to
    # each the product of its own row of W2 and the gated row of W1; all others score EC_NOT_SELECTED, which softmax
    # makes 0.
    "chains of blocks": """
        EC_MARKOV_NONE EC_MARKOV_VANILLA EC_MARKOV_GATED EC_MARKOV_RNN EC_MARKOV_SELECTOR
    """,
    # The matrices: the first three exist once, the others in each layer.
    "matrices of encoders": """
        EC_ENCODER_PATCH  # [n_embd][n_patch], of floats
        EC_ENCODER_PROJECTION  # [n_middle, or n_out where there is no second one][width of a merged row]
        EC_ENCODER_PROJECTION_2  # [n_out][n_middle], behind a GELU; may be absent
        EC_ENCODER_Q EC_ENCODER_K EC_ENCODER_V
        EC_ENCODER_ATTN_OUT  # [n_embd][n_embd]
        EC_ENCODER_UP  # [n_ff][n_embd]
        EC_ENCODER_DOWN  # [n_embd][n_ff]
        EC_ENCODER_N_MATRICES
    """,
    # The vectors (float32): those from EC_ENCODER_NORM_1 on exist in each layer. Biases may be absent.
    "vectors of encoders": """
        EC_ENCODER_PATCH_BIAS EC_ENCODER_POST_NORM EC_ENCODER_POST_NORM_BIAS EC_ENCODER_MERGED_NORM
        EC_ENCODER_MERGED_NORM_BIAS  # of merged rows; may be absent
        EC_ENCODER_PROJECTION_BIAS EC_ENCODER_PROJECTION_2_BIAS EC_ENCODER_NORM_1 EC_ENCODER_NORM_1_BIAS
        EC_ENCODER_NORM_2 EC_ENCODER_NORM_2_BIAS EC_ENCODER_Q_BIAS EC_ENCODER_K_BIAS EC_ENCODER_V_BIAS
        EC_ENCODER_ATTN_OUT_BIAS EC_ENCODER_UP_BIAS EC_ENCODER_DOWN_BIAS EC_ENCODER_N_VECTORS
    """,
}

# Names with numbers of their own.
VALUES = {
    # What is special about a layer: it sees the last sliding_window tokens; its queries and keys are not rotated.
    "EC_LAYER_SLIDES": 1,
    "EC_LAYER_UNROTATED": 2,
    "EC_KV_OF_TARGET": -1,  # of a draft head's layer: those of its target's last layer that slides, or not, as it does
    "EC_AHEAD_ROWS": 16,  # these three of ec_model_set_ahead
    "EC_AHEAD_USUAL": -1,
    "EC_MOST_AHEAD": 65536,
    "EC_MOST_BLOCK": 128,
    "EC_MOST_DISTANCE": 128,
    # The most rows of a forward whose spans of attention are cut among threads, and the most floats that threads keep
    # of spans for one another.
    "EC_CUT_ROWS": 32,
    "EC_MOST_KEPT": 4194304,
}


def _without_comments(text: str) -> str:
    return re.sub("#.*", "", text)


NAMES = {table: tuple(_without_comments(text).split()) for table, text in _NAMES.items()}
NUMBERS = {name: i for names in NAMES.values() for i, name in enumerate(names)} | VALUES

# The fields of each structure, as C declares them.
_STRUCTURES = {
    # The shape of a model, and how it differs from others of its shape: what has the name of a field of Switches or
    # Recurrence, in edgedec_runtimes/architectures/architecture.py, is that; booleans are 0 or 1.
    "ec_config": """
        int32_t n_vocab, n_embd, n_layer, rope_interleaved, activation, ungated, wide_norms, value_norm
        int32_t n_per_layer  # elements that each layer gets of a token; 0: it gets none. Items then have tokens
        int32_t sliding_window, temperature_tokens
        float temperature_scale, rms_epsilon, embedding_scale, residual_scale, logit_scale, attention_scale
        float attention_softcap, logit_softcap
        int32_t n_expert  # of a layer with a mixture; 0: there is none
        int32_t n_expert_used  # experts that a row goes through
        int32_t n_ff_expert  # a multiple of 32
        int32_t expert_gating, norm_experts
        float expert_scale, glu_limit, glu_slope
        int32_t attention_gate, state_rule, n_state_head, n_state_key_head, n_state_key, n_state_value, state_tiled
        int32_t norms_after_rope, early_router, norm_period, scaled_vectors
    """,
    # The shape of a layer. A layer that reads the keys and values of another one has neither EC_K nor EC_V.
    "ec_layer": """
        int32_t flags  # EC_LAYER_...
        int32_t mixer  # EC_MIXER_...
        int32_t n_head  # this number and the next two are of attention
        int32_t n_head_kv, head_dim
        int32_t n_ff  # of the feed-forward block, in a layer with experts of the shared one; 0: there is none
        # the layer whose keys and values it reads: its own number, that of a layer before it, or EC_KV_OF_TARGET
        int32_t kv_from
        int32_t role  # EC_ROLE_..., of all layers or of none another than EC_ROLE_ALL
    """,
    # The bytes of a tile file that one stage reads.
    "ec_part": """
        int32_t stage
        int32_t layer  # 0 for the output matrix
        int64_t row_begin  # rows of the output matrix, from a multiple of 32 on; else 0
        int64_t row_end
        uint64_t offset  # a multiple of 64
        uint64_t n_bytes
        const void *data  # the part in memory, borrowed; NULL: each forward reads it
    """,
    # Rows of a forward that pass the same layers.
    "ec_group": """
        int32_t n_rows
        int32_t first_layer  # the layer to begin with
        const int32_t *tokens  # [n_rows], or NULL when vectors are given
        const float *vectors  # [n_rows][(1 + n_added) * n_embd]
        # behind each of the layers from 0 on, of so many, the next n_embd numbers of `vectors` are added to the state;
        # first_layer is 0 then
        int32_t n_added
        const uint8_t *attn  # [n_layer], which attention blocks run; NULL for all
        const uint8_t *mlp  # [n_layer]
    """,
    # One session's rows of a forward, one behind the other in the slots from n_past on. In models with states, all of
    # them are one group.
    "ec_item": """
        ec_session *session
        int32_t n_past
        int32_t n_rows  # of all groups
        const ec_group *groups  # [n_groups]
        int32_t n_groups
        int32_t n_wanted  # rows whose logits are wanted
        const int32_t *wanted  # [n_wanted], ascending
        const int32_t *parents  # [n_rows], -1 for the cached prefix; NULL for a chain
        const int32_t *taps  # [n_taps], layers whose output to copy
        float *tapped  # [n_taps][n_rows][n_embd]; of a row that enters behind the layer, what it enters with
        int32_t n_taps
        int32_t block  # EC_BLOCK_...
        # [n_past + n_rows][3], of each slot: the places that its pairs turn to, the first one unless ec_model_set_rope
        # says which; NULL: all are its number
        const int32_t *places
        const int32_t *mass_layers  # [n_mass], the layers whose attention is added up; of a chain only
        const float *mass_weights  # [n_mass][n_rows], what the attention of each row is multiplied by; 0: left out
        float *mass  # [n_mass][n_mass_heads][n_mass_slots], to which each row's attention is added, by slot
        int32_t n_mass
        int32_t n_mass_heads  # at least those of each of these layers
        int32_t n_mass_slots  # at least n_past + n_rows
        # the first slots, which an encoder reads: all of them are rows of one item, or none is; 0 without an encoder
        int32_t n_source
    """,
    "ec_draft_head_config": """
        int32_t n_vocab  # tokens that the head can draft
        int32_t n_embd
        int32_t n_layer  # 1 of a head whose attention reads pairs
        int32_t n_head, n_head_kv, head_dim, n_ff, n_taps, fc_norm
        int32_t norm_before_residual  # the residual stream begins with the feature after its norm
        int32_t feeds_back_normed  # the next pair gets the layer's output after the output norm
        # rows of a block, at most EC_MOST_BLOCK; 0: the head reads pairs, and nothing below but rms_epsilon and
        # rope_base is read
        int32_t block_size
        # row i scores the token behind its own position (1), or at it (0): then row 0 scores none
        int32_t block_shifted
        int32_t block_causal  # a row sees the rows before it (1), or all rows of the block (0)
        int32_t markov  # EC_MARKOV_...
        int32_t rank
        int32_t top_k  # tokens that EC_MARKOV_SELECTOR scores in a row; else 0
        # rows that the convolutions before and behind a layer's blocks go over; 0: there are none
        int32_t conv_length
        int32_t conv_group  # elements that share what is added to their kernels
        int32_t mask_token  # whose embedding masked rows have; -1: EC_DRAFT_HEAD_MASK
        float rms_epsilon, rope_base
        float embedding_scale  # of the embeddings and the mask
        float logit_scale, logit_softcap
        # Rows that the head adds behind a row of the target, and that enter layer rows_layer; 0: not a row head.
        # Then nothing else but n_vocab and n_embd is read, and the head has one layer and no taps.
        int32_t n_rows_made, rows_layer
        # The head's layers see what enters this layer of the target, its only tap, and its drafts pass those below; 0:
        # it is no such head. It has one layer, which may lack a feed-forward block.
        int32_t exit_layer
        # The layers of a head that joins pairs have EC_KV_OF_TARGET, and their rows see the tokens before the draft.
        int32_t reads_target
    """,
    # How a chain is drafted: of at most n_max nodes; it ends with the node at which the product of the nodes' chances
    # (`sure` of ec_drafted) falls below least_path, or after most_seconds. A chance p counts as p * factors[i], at most
    # 0.995, where i is the number of edges at or below p.
    "ec_draft_rules": """
        int32_t n_max, n_edges
        const float *edges  # [n_edges], ascending
        const float *factors  # [n_edges + 1], or NULL for 1
        double least_path, most_seconds
    """,
    # A node of a chain: the most probable token, and the second one (-1 for none), with the head's probabilities.
    # `sure` is the chance that it is accepted where all nodes before it are, by the head's confidence; p where it has
    # none.
    "ec_drafted": """
        int32_t token
        float p
        int32_t second_token
        float second_p, sure
    """,
    # A text to draft for: its session, and `token`, which stands at position n_past and was not evaluated yet. For
    # ec_draft_scores, an n_past of -1 says that `token` was drafted behind what the last call read.
    "ec_draft_item": """
        ec_session *session
        int32_t n_past, token
        ec_draft_rules rules  # of ec_draft_chains
        ec_drafted *nodes  # [rules.n_max], for ec_draft_chains
        float *scores  # [n_vocab of the head], for ec_draft_scores
        int32_t n_found  # the result
    """,
    # The shape of an encoder.
    "ec_encoder_config": """
        int32_t n_patch  # numbers of a patch: its red, green and blue planes
        int32_t n_embd, n_ff, n_layer, n_head, n_out
        int32_t activation  # EC_SILU, EC_GELU or EC_GELU_QUICK
        int32_t merge  # merge x merge patches become one row
        # by their average, and the norm of merged rows is by their root mean square; else the patches of a row of the
        # square lie one behind the other, then the next row's
        int32_t pools
        float epsilon, merged_epsilon
    """,
}


def _fields(text: str) -> Iterator[str]:
    """Yield each field by itself: those of one type may stand on one line."""
    for line in filter(str.strip, _without_comments(text).splitlines()):
        first, *others = line.strip().split(", ")
        kind = first.removesuffix(re.split(r"\W", first)[-1])
        yield from (first, *(kind + name for name in others))


STRUCTURES = {name: tuple(_fields(text)) for name, text in _STRUCTURES.items()}
VERSION = zlib.crc32(repr((INTERFACE, NAMES, VALUES, STRUCTURES)).encode()) & 0x7FFFFFFF
"""What ec_abi_version() returns of a library that was compiled with these tables."""

_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def type_of(kind: str) -> Any:
    """Return the ctypes type of a C type.

    >>> type_of("const volatile int32_t *"), type_of("int32_t ")
    (<class 'ctypes.c_void_p'>, <class 'ctypes.c_int'>)
    """
    plain = re.sub("const |volatile ", "", kind).strip()
    return ctypes.c_char_p if plain == "char *" else _TYPES.get(plain, ctypes.c_void_p)


def structures() -> dict[str, type[ctypes.Structure]]:
    """Return the structures for ctypes, which knows those that others have within them, or point to."""
    made = dict[str, type[ctypes.Structure]]()
    for structure, fields in STRUCTURES.items():
        typed = list[tuple[str, Any]]()
        for declared in fields:
            name = re.split(r"\W", declared)[-1]
            kind = declared.removesuffix(name)
            inner = made.get(re.sub(r"const |[ *]", "", kind))
            if inner is None:
                typed.append((name, type_of(kind)))
            else:
                typed.append((name, ctypes.POINTER(inner) if "*" in kind else inner))
        made[structure] = type(structure, (ctypes.Structure,), {"_fields_": typed})
    return made


def numbers(table: str, prefix: str) -> dict[str, int]:
    """Return the numbers of a table by their names without a prefix, in small letters.

    >>> numbers("gatings", "EC_GATING_")
    {'softmax': 0, 'sigmoid': 1, 'chosen': 2, 'relu': 3}
    """
    return {name.removeprefix(prefix).lower(): i for i, name in enumerate(NAMES[table])}


def header() -> str:
    """Return the tables as C."""
    lines = ["/* Made by native_tables.py, which says what each of these is. */", f"#define EC_ABI_VERSION {VERSION}"]
    lines += [f"enum {{ {', '.join(names)} }};" for names in NAMES.values()]
    lines += [f"enum {{ {name} = {value} }};" for name, value in VALUES.items()]
    opaque = ("ec_model", "ec_session", "ec_kernels", "ec_mapping", "ec_draft_head", "ec_encoder")
    lines += [f"typedef struct {name} {name};" for name in opaque]
    for name, fields in STRUCTURES.items():
        lines += [f"typedef struct {name} {{", *(f"  {field};" for field in fields), f"}} {name};"]
    lines.append("#define EC_STRUCTURES(apply) " + " ".join(f"apply({name})" for name in STRUCTURES))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    path, text = Path(sys.argv[1]), header()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
