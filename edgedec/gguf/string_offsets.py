"""Finding where the strings of a GGUF array begin. A string is its length, a little-endian u64, and its bytes.

Where a string begins follows from the lengths of all strings before it. A vocabulary has 150,000 of them, and a step of
Python for each would take longer than all else when a model is opened. But nearly all lengths are below 256, so seven
zero bytes follow the first byte of a length. numpy finds all such places of a block at once; a place counts as a length
only where the string before it ends there.
"""

import struct

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 19
_N_STEPS, _MAX_STEPS = 64, 2**14
_LENGTH = struct.Struct("<Q")


def string_offsets(buffer: bytes | bytearray, start: int, n: int) -> NDArray[np.int64]:
    r"""Return int64[k + 1]: where the lengths of strings 0 to k - 1 begin, and where string k - 1 ends.

    k is n, or the number of strings that the buffer holds whole from `start` on.

    >>> string_offsets(b"\3\0\0\0\0\0\0\0abc\0\0\0\0\0\0\0\0\1\0\0\0", 0, 3)
    array([ 0, 11, 19])
    """
    offsets = [np.array([start], np.int64)]
    position, left, n_steps = start, n, _N_STEPS
    while left:
        leapt = _leap(buffer, position, left)
        # The less a leap covered, the more single steps follow it. So strings that are made to defeat the leaps cost
        # little more than their steps.
        n_steps = _N_STEPS if len(leapt) > n_steps else min(2 * n_steps, _MAX_STEPS)
        position = int(leapt[-1]) if len(leapt) else position
        stepped = _steps(buffer, position, min(left - len(leapt), n_steps))
        if not len(leapt) and not len(stepped):
            break
        offsets += [leapt, stepped]
        position = int(stepped[-1]) if len(stepped) else position
        left -= len(leapt) + len(stepped)
    return np.concatenate(offsets)


def _leap(buffer: bytes | bytearray, start: int, n: int) -> NDArray[np.int64]:
    """Return where the next strings of a block end, up to the first whose length is 256 bytes or more."""
    n_bytes = min(_BLOCK_BYTES, len(buffer) - start)
    if n_bytes < _LENGTH.size:
        return np.empty(0, np.int64)
    block = np.frombuffer(buffer, np.uint8, n_bytes, start)
    zero = block[1:] == 0
    zero = zero[:-1] & zero[1:]
    zero = zero[:-2] & zero[2:]
    places = np.flatnonzero(zero[:-3] & zero[3:])[:n]
    ends = places + _LENGTH.size + block[places]
    begins = np.concatenate(([0], ends))[: len(places)]
    n_sound = int(np.argmin(np.append(places == begins, False)))
    sound = ends[:n_sound]
    return sound[: int(np.searchsorted(sound, n_bytes, side="right"))] + start


def _steps(buffer: bytes | bytearray, position: int, n: int) -> NDArray[np.int64]:
    """Return where the next n strings end, found one after another."""
    ends, unpack, end = [], _LENGTH.unpack_from, len(buffer)
    for _ in range(n):
        if position > end - _LENGTH.size:
            break
        position += _LENGTH.size + unpack(buffer, position)[0]
        if position > end:
            break
        ends.append(position)
    return np.array(ends, np.int64)
