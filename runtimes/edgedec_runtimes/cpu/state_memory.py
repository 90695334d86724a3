"""What layers with a recurrent state take of memory: the terms of a plan (native/forward/recurrent_state.h)."""

from edgedec.errors import counted
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.cpu import kv_types
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.shared.hyperparameters import RECURRENT

LOGGED_ROWS = 32
"""Rows that a long chain leaves in the log."""
SPARE_ROWS = 8
"""Rows whose memory is kept when they are dropped."""
MOST_CHECKPOINTS = 4
BLOCK_TOKENS = 256
"""Tokens of a block of a prompt on the disk."""
PLACE_BYTES = 12
"""Bytes of a token's place in such a block, in models that turn by pictures' rows and columns."""
QUEUED = 2
"""Most of their files that wait to be written."""
_LANES = 32  # of a tile of a state


def state_bytes(network: Network) -> int:
    """Return the bytes of the states of a session."""
    r = network.switches.recurrence
    if r is None:
        return 0
    return 4 * network.n_with(RECURRENT) * r.n_head * r.n_key * (-(-r.n_value // _LANES) * _LANES)


def row_bytes(network: Network) -> int:
    """Return the bytes of a row in the log of a session."""
    r = network.switches.recurrence
    if r is None:
        return 0
    updates = r.n_head * (-(-r.n_value // _LANES) * _LANES)
    return 4 * network.n_with(RECURRENT) * (r.n_column + r.n_key_head * r.n_key + r.n_head + updates)


def scratch_floats(network: Network) -> int:
    """Return the float32 numbers of a row that native/forward/model.cpp allocates for forwards."""
    r = network.switches.recurrence
    if r is None:
        return 0
    n_layer = max(network.n_with(RECURRENT), 1)
    updates = r.n_head * (-(-r.n_value // _LANES) * _LANES)
    products = r.n_column + r.n_values + 2 * r.n_head + (r.n_column if r.rule == "space" else 0)
    return products + row_bytes(network) // 4 // n_layer + r.n_key_head * r.n_key + r.n_head + updates + r.n_values


def state_terms(network: Network, n_parallel: int, n_rows: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of the recurrent states; none where the model has no such layers.

    Args:
        network: The sizes of the model.
        n_parallel: Sessions.
        n_rows: The most rows of logits of a forward, which are those that may be taken back.
    """
    r = network.switches.recurrence
    n_layers = network.n_with(RECURRENT)
    if r is None or not n_layers:
        return ()
    of_states, of_row, n_back = state_bytes(network), row_bytes(network), r.length - 1
    n_logged = max(LOGGED_ROWS, n_rows) + n_back
    rows, layers = counted(n_logged, "row"), counted(n_layers, "layer")
    of_checkpoints = n_parallel * MOST_CHECKPOINTS * (of_states + n_back * of_row)
    return (
        MemoryTerm("recurrent states", n_parallel * of_states, f"{layers} of {network.n_layer} × {n_parallel}"),
        MemoryTerm(
            "rows that may be taken back", n_parallel * (n_logged + SPARE_ROWS) * of_row, f"{rows} × {n_parallel}"
        ),
        MemoryTerm("checkpoints of states", of_checkpoints, f"{MOST_CHECKPOINTS} × {n_parallel}"),
    )


def prompt_terms(network: Network, options: LoadOptions, n_ctx: int) -> tuple[MemoryTerm, ...]:
    """Return the term of prompts' files: those that wait, one that is written, one that is read; none without them."""
    if not options.prompt_cache_bytes or n_ctx < BLOCK_TOKENS or network.is_encoder:
        return ()
    n_tokens = min(network.n_source + kv_types.PAGE_TOKENS, n_ctx) if network.n_source else BLOCK_TOKENS
    token_bytes = kv_types.token_bytes(network, options.kv_type) + PLACE_BYTES
    of_states = state_bytes(network) + kv_types.column_bytes(network, n_ctx)
    n_bytes = (QUEUED + 2) * max(n_tokens * token_bytes, of_states)
    return (MemoryTerm("prompt cache", n_bytes, "prompts being written and read", grows=True),)
