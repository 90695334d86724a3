"""The options that only the cpu runtime has."""

from dataclasses import dataclass
from typing import Literal

from edgedec.load_options import LoadOptions, read_options


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """The cpu runtime's own options (edgedec.load_options).

    Attributes:
        mmap: Map the weights from the disk instead of copying them.
        tile_cache: Keep rearranged weights on the disk, in edgedec's cache; nothing is kept without a cache.
        huge_pages: Whether the weights lie in pages of 2 MiB: "auto" where such pages are free, "off", or "on", which
            may read the tiles again or copy them to memory that no other process shares.
        prefetch: How far ahead of a product weights are fetched into the caches: "auto" for what was measured on this
            machine, "usual" for what the kernels do by themselves, "off", or bytes as "L1:4608", "L2:4608" or
            "L1:1536+L2:12288". No setting changes a bit.
    """

    mmap: bool = True
    tile_cache: bool = True
    huge_pages: Literal["auto", "on", "off"] = "auto"
    prefetch: str = "auto"


def cpu_options(options: LoadOptions) -> CpuOptions:
    """Return the runtime's own options (raises as edgedec.load_options.read_options)."""
    return read_options(CpuOptions, options.runtime_options, "the cpu runtime")
