"""The tiles of a model of which only some parts stay in memory; each forward reads the others."""

from pathlib import Path

import numpy as np

from edgedec.gguf.tile_header import TileHeader, read_tile_header
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_runtimes.cpu.library import Part, address, check, native
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.tensor_places import PER_LAYER_PROJECTION, PER_LAYER_ROWS
from edgedec_runtimes.cpu.tiles.paged_file import PagedFile, page_buffer
from edgedec_runtimes.cpu.tiles.streaming import StreamPlan


class StreamedTiles:
    """The tiles of a native model that streams its weights; they take the place of Tiles.

    Attributes:
        header: The header of the tile file.
        label: The model's name, for messages and progress.
        path: The tile file, which stays open: deleting or replacing it changes nothing.
        n_bytes: The most bytes of weights in memory at a time.
        plan: Which parts stay in memory.
    """

    def __init__(
        self,
        path: Path,
        label: str,
        plan: StreamPlan,
        *,
        on_progress: OnProgress | None = None,
        cancel: CancelToken | None = None,
    ) -> None:
        """Open a tile file and read the parts that stay in memory.

        Raises:
            StorageError: The file can't be read.
            ModelFormatError: The file is damaged.
            MemoryCapError: The system has no memory for the parts that stay.
            CancelledError: `cancel` was cancelled, which is checked between two parts.
        """
        self.path, self.label, self.plan, self.n_bytes = path, label, plan, plan.resident_bytes
        self._file = PagedFile(path)
        try:
            self.header: TileHeader = read_tile_header(path, label)
            self._memory, self._kept = page_buffer(plan.staying_bytes), page_buffer(0)
            self._addresses = self._read_staying(on_progress, cancel)
        except BaseException:
            self.close()
            raise

    def _read_staying(self, on_progress: OnProgress | None, cancel: CancelToken | None) -> list[int | None]:
        """Read the parts that stay, and return the address of each part in memory; None for a part that is streamed."""
        total = sum(part.n_bytes for part in self.plan.parts if part.stays)
        addresses: list[int | None] = []
        begin, done = 0, 0
        for part in self.plan.parts:
            if part.stays and not part.n_bytes:
                addresses.append(address(self._memory))  # nothing is read there
                continue
            if not part.stays:
                addresses.append(None)
                continue
            check_cancelled(cancel, f"loading {self.label}")
            out = self._memory[begin : begin + part.held_bytes]
            addresses.append(address(out) + self._file.read(part.offset, part.n_bytes, out))
            begin, done = begin + part.held_bytes, done + part.n_bytes
            report_progress(on_progress, "weights", done, total, "bytes", f"{self.label}, those that stay in memory")
        return addresses

    def attach(self, handle: object, network: Network) -> None:
        """Tell a native model where its matrices lie in the file, and begin to stream. The tiles must outlive it."""
        library = native()
        places = self.header.places()
        for placed in network.matrices:
            tensor = placed.tensor
            matrix = placed.which, placed.layer, tensor.type, tensor.shape[1], tensor.shape[0]
            offset, n_bytes = places[tensor.name], library.ec_tile_bytes(*matrix[2:])
            if placed.which == PER_LAYER_PROJECTION:
                self._kept = page_buffer(self.plan.kept_bytes)
                place = address(self._kept) + self._file.read(offset, n_bytes, self._kept)
                check(library.ec_model_set_matrix(handle, *matrix, place, n_bytes), tensor.name)
            else:
                check(library.ec_model_place_matrix(handle, *matrix, offset, n_bytes), tensor.name)
        parts = (Part * len(self.plan.parts))(
            *(
                Part(p.stage, p.layer, p.row_begin, p.row_end, p.offset, p.n_bytes, data)
                for p, data in zip(self.plan.parts, self._addresses, strict=True)
            )
        )
        code = library.ec_model_stream(
            handle, self._file.handle, self._file.n_bytes, parts, len(parts), self.plan.ring_bytes
        )
        check(code, f"streaming {self.label}")
        for placed in network.matrices:
            if placed.which == PER_LAYER_ROWS:
                file = self._file.handle, self._file.n_bytes
                code = library.ec_model_read_rows(handle, placed.which, *file, places[placed.tensor.name])
                check(code, placed.tensor.name)
        if self.plan.experts is not None:
            code = library.ec_model_stream_experts(handle, self.plan.experts.n)
            check(code, f"streaming the experts of {self.label}")

    def close(self) -> None:
        """Close the file and give the memory back. The native model must have been destroyed."""
        self._file.close()
        self._memory = self._kept = np.empty(0, np.uint8)
