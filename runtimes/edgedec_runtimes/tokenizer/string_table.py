"""Many byte strings in one block of memory, which are found by number and by content.

A vocabulary has up to 262,144 tokens. A dictionary of them would take some 35 MB, and a third of a second to make. Here
each string takes its own bytes and about 14 more.
"""

from collections.abc import Sequence

import numpy as np

_MAX_BLOB_BYTES = 2**31 - 1


class StringTable:
    """Byte strings that are numbered from 0 in the order of `strings`; `find` is the inverse of `[]`.

    Attributes:
        n: How many strings there are.
        blob: All strings, one after another.
        starts: int32[n + 1], where each string begins in `blob`, and the end.
    """

    def __init__(self, strings: Sequence[bytes]) -> None:
        self.n = len(strings)
        self.blob = b"".join(strings)
        assert len(self.blob) <= _MAX_BLOB_BYTES, "a GGUF header is smaller"
        self.starts = np.zeros(self.n + 1, np.int32)
        np.cumsum(np.fromiter(map(len, strings), np.int32, self.n), out=self.starts[1:])
        # The numbers are sorted by bucket (the low bits of Python's hash), in which equal hashes stand together. The
        # numbers are the low bits of what is sorted, as that takes a tenth of the time of a stable order.
        n_bits = max(self.n, 2).bit_length()
        low = np.uint64((1 << n_bits) - 1)
        hashes = np.fromiter(map(hash, strings), np.int64, self.n).view(np.uint64)
        turned = (hashes << np.uint64(64 - n_bits)) | (hashes >> np.uint64(n_bits) & ~low)
        turned |= np.arange(self.n, dtype=np.uint64)
        turned.sort()
        order = (turned & low).astype(np.int32)
        counts = np.bincount((turned >> np.uint64(64 - n_bits)).astype(np.int64), minlength=1 << n_bits)
        buckets = np.zeros((1 << n_bits) + 1, np.int32)
        np.cumsum(counts, out=buckets[1:])
        is_alike = turned[:-1] ^ turned[1:] <= low
        self._alike = order[:-1][is_alike], order[1:][is_alike]
        self._mask = (1 << n_bits) - 1
        # A memoryview is three times as fast to read element by element as an array.
        self._starts, self._order, self._buckets = self.starts.data, order.data, buckets.data

    def __len__(self) -> int:
        """Return the number of strings."""
        return self.n

    def __getitem__(self, number: int) -> bytes:
        """Return the string of a number from 0 to n - 1."""
        return self.blob[self._starts[number] : self._starts[number + 1]]

    def find(self, string: bytes) -> int:
        """Return the lowest number that a string has; -1 where it is not there."""
        bucket = hash(string) & self._mask
        blob, starts = self.blob, self._starts
        for number in self._order[self._buckets[bucket] : self._buckets[bucket + 1]]:
            if blob[starts[number] : starts[number + 1]] == string:
                return number
        return -1

    def repeated(self) -> tuple[int, int] | None:
        """Return the numbers of two equal strings; None where all strings differ."""
        for first, second in zip(*self._alike, strict=True):
            if self[first] == self[second]:
                return int(first), int(second)
        return None
