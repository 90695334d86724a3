"""A model of an encoder's and a decoder's graph: shared/sources.py is the seam, keys and values are arrays."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ContextFullError, ModelFormatError
from edgedec.gguf.file import reading
from edgedec.gguf.two_graphs import graphs_of
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward, Model
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, check_cancelled
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import even
from edgedec_runtimes.onnx.foreign.model import Arrays, ForeignModel, ForeignSession
from edgedec_runtimes.onnx.graph_check import check_graph
from edgedec_runtimes.onnx.graph_model import LOGIT_ROWS, Opened
from edgedec_runtimes.onnx.library import session_options, translated
from edgedec_runtimes.onnx.source_graphs import checked_graphs, takes_rows
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.pages import with_mappings
from edgedec_runtimes.shared.session_state import CheckedItem
from edgedec_runtimes.shared.sources import SourceModel, SourceSession

_MOST_GRAPH_BYTES = 1 << 31  # protobuf's own limit


class _TwoCaches(ForeignSession):
    """A session with keys and values of a text, and others of its source, which stand before them in a saved state.

    Attributes:
        crossed: Those of the source, f32[1, n_head, n_source, head_dim] each; empty before the encoder has read it.
        begun: Logits and keys and values of the token that a text begins with; None where the encoder is to read again.
    """

    source: NDArray[np.int32]
    crossed: Sequence[NDArray[np.float32]] = ()
    begun: tuple[NDArray[np.float32], Arrays] | None = None

    def _fork(self) -> Any:
        twin: Any = super()._fork()
        twin.crossed, twin.begun = self.crossed, self.begun
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        text = super()._arrays(n - len(self.source))
        return [np.concatenate(pair, axis=2) for pair in zip(self.crossed, text, strict=True)]

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Literal[True]:
        n_source = len(self.source)
        self.crossed, self.begun = [array[:, :, :n_source].copy() for array in arrays], None
        return super()._take([array[:, :, n_source:] for array in arrays], n)

    def _free(self) -> None:
        super()._free()
        self.crossed, self.begun = (), None


class OnnxSourceSession(SourceSession, _TwoCaches):
    """Implements edgedec.model.Session."""


class OnnxSourceModel(ForeignModel, SourceModel[Opened, ForeignSession]):
    """Implements edgedec.model.Model; `opened.graph` are SourceGraphs, and `max_rows` is 1 where they take no more."""

    session_type = OnnxSourceSession

    def _encode(self, session: OnnxSourceSession) -> None:
        """Have the encoder read a session's source, and the decoder the token that follows it."""
        begin = partial(self.handle.graph.begin, session.source, self.start, self._running)
        logits, text, session.crossed = self._stoppable(begin)
        session.begun = (logits, text)

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate rows of a text, of which a Marian has no more than its table of positions."""
        session, n_past = item.session, item.n_past - len(item.session.source)
        most = self._n_source if self.card.architecture == "marian" else self.card.n_ctx_train
        if n_past + item.n_rows > most:
            raise ContextFullError(f"the decoder of this model writes {most} tokens at most; ask for fewer")
        if n_past == 0 and session.begun is None:
            self._encode(session)
        return super()._run(item, on_progress)

    def _run_piece(self, item: CheckedItem, begin: int, end: int) -> NDArray[np.float32]:
        """Have the decoder read rows [begin, end); what follows from the first token of a text is known by then."""
        session, tokens, graphs = item.session, item.groups[0].tokens, self.handle.graph
        assert tokens is not None, "vectors were refused"
        n_text, logits = item.n_past + begin - len(session.source), list[NDArray[np.float32]]()
        while begin < end:
            n = 1 if n_text == 0 or self.capabilities.max_rows == 1 else end - begin
            rows, n_more = tokens[begin : begin + n], even(n) - n if self.is_padded else 0
            results, caches = session.begun, (session.past(n_text), session.crossed)
            if n_text:
                rows = np.append(rows, rows[n - n_more :])
                results = self._stoppable(partial(graphs.go_on, rows, caches, self._running))
            logits.append(results[0][:n])
            session.hold(results[1])
            begin, n_text = begin + n, n_text + n
        return np.concatenate(logits)


def files_of(graphs: Sequence[Path]) -> list[Path]:
    """Return the graphs, and the files beside them that hold their weights, which are called as they are."""
    names = [file.name + end for file in graphs for end in ("_data", ".data")]
    return [*graphs, *(file for name in names if (file := graphs[0].with_name(name)).is_file())]


def load_sources(
    ort: Any,
    export: Export,
    options: LoadOptions,
    n_threads: int,
    tokenizer: Tokenizer,
    card: ModelCard,
    terms: Callable[[int, int], tuple[MemoryTerm, ...]],
) -> Model:
    """Check the graphs of a folder of an encoder and a decoder, open them, and return the model."""
    paths, settings = graphs_of(export.folder), session_options(ort, n_threads)
    files = files_of(paths)
    sizes = {file.name: file.stat().st_size for file in files}

    def sessions() -> Iterator[Any]:
        for path in paths:
            check_cancelled(options.cancel, f"loading {export.folder.name}")
            try:
                with reading(path), path.open("rb") as file:
                    graph = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                check_graph(graph, sizes, _MOST_GRAPH_BYTES)
            except (ModelFormatError, ValueError) as error:  # an empty file can't be mapped
                raise ModelFormatError(f"{path}: {error}") from error
            with translated(f"{path}: it can't be opened"):
                yield ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

    opened, mapped = with_mappings(files, lambda: list(sessions()))
    graphs = checked_graphs(opened, export)
    most = LOGIT_ROWS if takes_rows(graphs, options.cache_dir, card.fingerprint) else 1
    can = Capabilities(rollback=True, fork=True, max_rows=most, prefill_chunk=1)  # a source is read whole
    held = Opened(ort, graphs, export, mapped, MappedFiles(files, mapped))
    return OnnxSourceModel(held, graphs.contract, tokenizer, card, terms, options.cache_dir, can)
