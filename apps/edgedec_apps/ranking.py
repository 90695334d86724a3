"""Ranks documents: an encoder with a head scores pairs of texts; a model that writes is asked for yes or no.

A score depends on the query and the document alone, wherever the runtime's forwards are batch-invariant to the bit
(docs/same-text.md): documents share forwards only there, and an encoder reads each by itself.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, sqrt
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.api.branching import branches
from edgedec.api.engine import Engine
from edgedec.callers import checks_arguments, one_line
from edgedec.decoding.reading import prompt_read
from edgedec.decoding.text_room import tokens_behind
from edgedec.errors import CapabilityError, ModelFormatError, OptionError, PromptTooLongError
from edgedec.gguf.file import GGUF, read_header_of
from edgedec.gguf.metadata import get_array, get_float, get_int
from edgedec.gguf.model_kinds import Pooling, is_ranker
from edgedec.gguf.values import ValueType
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sequence import n_common
from edgedec.sessions.forks import are_together
from edgedec.sessions.text_pages import PAGE_TOKENS, n_pages
from edgedec.tokenizer import Tokenizer
from edgedec_apps.embedding import embed_on
from edgedec_apps.rank_prompts import pair_form, question_form, template_of
from edgedec_runtimes.shared.final_norm import FinalNorm, read_final_norm
from edgedec_runtimes.weights.levels import read_rows

F64 = NDArray[np.float64]
_MOST_OUTPUTS = 4096
_OUT, _DENSE = "cls.output", "cls"
_MEAN = 1


@dataclass(frozen=True, slots=True)
class RankHead:
    """The head of a cross-encoder (Nogueira and Cho 2019, arXiv:1901.04085): a layer, an activation, a norm, a layer.

    Attributes:
        pooling: Which state of a text the head reads.
        dense, dense_bias: float64[n_dense, n_embd] and float64[n_dense], or None.
        uses_gelu: Whether the activation is GELU (ModernBERT) and not tanh (BERT).
        norm: float64[n_dense], the weight of a layer norm, or None.
        epsilon: Is added to that norm's variance.
        out, out_bias: float64[n_out, n_dense] and float64[n_out], or None; without it the first layer is the last.
    """

    pooling: Pooling
    dense: F64 | None
    dense_bias: F64 | None
    uses_gelu: bool
    norm: F64 | None
    epsilon: float
    out: F64 | None
    out_bias: F64 | None

    def outputs(self, state: NDArray[np.float32]) -> F64:
        """Return float64[n_out] for a text's state, f32[n_embd]."""
        x: F64 = state.astype(np.float64)
        if self.dense is not None:
            x = self.dense @ x if self.dense_bias is None else self.dense @ x + self.dense_bias
            if self.out is None:
                return x
            x = np.array([0.5 * v * (1 + erf(v / sqrt(2))) for v in x.tolist()]) if self.uses_gelu else np.tanh(x)
        if self.norm is not None:
            centred = x - x.mean()
            x = centred / np.sqrt(np.mean(centred**2) + self.epsilon) * self.norm
        if self.out is not None:
            x = self.out @ x if self.out_bias is None else self.out @ x + self.out_bias
        return x


def read_rank_head(gguf: GGUF, architecture: str, n_embd: int, *, causal: bool = False) -> RankHead:
    """Return the head of a file; `causal` for a model that writes, which reads the state of a text's last token.

    Raises:
        CapabilityError: The file has none.
        ModelFormatError: Its layers do not fit the model or each other.
        UnsupportedModelError: edgedec does not take their quantization apart.
    """
    if f"{_OUT}.weight" not in gguf.tensors and f"{_DENSE}.weight" not in gguf.tensors:
        raise CapabilityError(
            f"{gguf.paths[0]}: the model has no head for ranking (no tensor {_OUT}.weight); use a reranker's GGUF"
        )
    dense = _matrix(gguf, f"{_DENSE}.weight", n_embd)
    n_dense = n_embd if dense is None else len(dense)
    out = _matrix(gguf, f"{_OUT}.weight", n_dense)
    n_out = n_dense if out is None else len(out)
    is_modern = architecture == "modern-bert"
    number = get_int(gguf, f"{architecture}.classifier.pooling_type", at_least=-1, at_most=2**31 - 1)
    by_mean = number == _MEAN or (number in (None, -1) and is_modern)
    epsilon = get_float(gguf, f"{architecture}.attention.layer_norm_epsilon")
    return RankHead(
        pooling="last" if causal else "mean" if by_mean else "cls",
        dense=dense,
        dense_bias=_vector(gguf, f"{_DENSE}.bias", n_dense),
        uses_gelu=is_modern,
        norm=_vector(gguf, f"{_DENSE}.norm.weight", n_dense),
        epsilon=1e-5 if epsilon is None else epsilon,
        out=out,
        out_bias=_vector(gguf, f"{_OUT}.bias", n_out),
    )


def _matrix(gguf: GGUF, name: str, n_in: int) -> F64 | None:
    """Return a tensor as float64[n_out, n_in], or None where there is none."""
    if name not in gguf.tensors:
        return None
    shape = gguf.tensors[name].shape
    n_out = shape[1] if len(shape) > 1 else 1
    if not (1 <= len(shape) <= 2 and shape[0] == n_in and 1 <= n_out <= max(n_in, _MOST_OUTPUTS)):
        raise _misshapen(gguf, name, shape, f"({n_in}, 1 or more)")
    return read_rows(gguf, name, 0, n_out).astype(np.float64)


def _vector(gguf: GGUF, name: str, n: int) -> F64 | None:
    if name not in gguf.tensors:
        return None
    shape = gguf.tensors[name].shape
    if shape not in ((n,), (n, 1)):
        raise _misshapen(gguf, name, shape, f"({n},)")
    return read_rows(gguf, name, 0, 1).reshape(-1).astype(np.float64)


def _misshapen(gguf: GGUF, name: str, shape: tuple[int, ...], expected: str) -> ModelFormatError:
    return ModelFormatError(
        f"{gguf.paths[0]}: {name} has the shape {shape}, expected {expected}; download another GGUF of the model"
    )


_ROWS = 256  # of a forward that several documents share
_MOST_TOGETHER = 16  # documents in it, as each brings a row of logits
_SAME = 0.9  # cosine from which two rows are the same row, quantized in two ways
_LABELS = ("yes", "no")


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well documents match a query.

    Attributes:
        scores: By document, in the order given; the higher, the better it matches.
        kind: "logit" of a cross-encoder's head, any number; "probability" that a model answers yes.
        n_tokens: By document, the tokens that its score was computed from, those of the query included.
        notes: Sentences on what the scores are worth.
        total_s: Seconds of everything.
    """

    scores: tuple[float, ...]
    kind: Literal["logit", "probability"]
    n_tokens: tuple[int, ...]
    notes: tuple[str, ...]
    total_s: float

    __repr__ = one_line

    @property
    def order(self) -> list[int]:
        """The documents' indices, the best match first; of equals the first one first."""
        return sorted(range(len(self.scores)), key=lambda i: -self.scores[i])

    @property
    def normalized(self) -> tuple[float, ...]:
        """The scores as numbers from 0 to 1: the sigmoid of a logit, and a probability as it is."""
        if self.kind == "probability":
            return self.scores
        return tuple(map(sigmoid, self.scores))

    def best(self, most: int | None, *, normalize: bool) -> tuple[list[tuple[int, float]], str]:
        """Return the best documents (all where `most` is None), each with its score, and what kind the scores are."""
        scores = self.normalized if normalize else self.scores
        kind = "normalized logit" if normalize and self.kind == "logit" else self.kind
        return [(i, scores[i]) for i in self.order[:most]], kind


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), which keeps small numbers apart."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(max(x, -745.0)) / (1 + math.exp(max(x, -745.0)))


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be scored: the engine, what it reads for each document, and who may stop it or looks on.

    `n_first` counts the tokens before a document, where an encoder reads it as the second of two texts; else None.
    """

    engine: Engine
    prompts: list[tuple[int, ...]]
    n_first: int | None
    cancel: CancelToken
    on_progress: OnProgress | None

    def done(self, n: int) -> None:
        """Report that `n` documents are scored (CancelledError where the work is to stop)."""
        report_progress(self.on_progress, "ranking", n, len(self.prompts), "documents")
        self.cancel.check("the ranking")


@checks_arguments
def rank(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    *,
    max_document_tokens: int | None = None,
    cancel: CancelToken | None = None,
    on_progress: OnProgress | None = None,
) -> Ranking:
    """Return how well each document matches a query; a document's score depends on the query and on it alone.

    Args:
        query: The question or the words to look for.
        documents: The texts.
        max_document_tokens: Cut documents to so many tokens, and to what fits the context; None for no cut.
        cancel: Stops the work, from any thread.
        on_progress: Called with the number of documents that were scored.

    Raises:
        RequestError: The query is empty, there is no document, or an argument has the wrong type or range.
        PromptTooLongError: The query, or a document that may not be cut, does not fit the context.
        CapabilityError: The model has neither a head for ranking nor a form of prompt that asks for yes or no.
        CancelledError: `cancel` stopped the work.
    """
    began, stop = perf_counter(), cancel or CancelToken()
    _check(query, documents, max_document_tokens)
    gguf = read_header_of(engine.path)
    tokenizer, n_most = engine.tokenizer, engine.requests.n_prompt_max
    is_encoder, n_trained = engine.model.capabilities.final_states, engine.card.n_ctx_train
    head = _head(engine, gguf, is_encoder=is_encoder)
    n_first = None
    if is_encoder:
        form, n_first = pair_form(tokenizer, gguf, query, n_most, n_trained)
    else:
        form = question_form(tokenizer, template_of(engine, gguf), query, n_most, n_trained)
    prompts: list[tuple[int, ...]] = []
    for i, document in enumerate(documents):
        stop.check("the ranking")
        try:
            prompts.append(form(document, max_document_tokens))
        except PromptTooLongError as error:
            raise PromptTooLongError(f"document {i} with the query: {error.marked}") from error
    work = Work(engine, prompts, n_first, stop, on_progress)
    if head is None:
        scores = by_answers(work, answer_ids(tokenizer, gguf))
    else:
        outputs = outputs_of(work, head, None if is_encoder else read_final_norm(engine.path))
        scores = tuple(float(each[0]) if is_encoder else sigmoid(float(each[0] - each[1])) for each in outputs)
    if not all(map(math.isfinite, scores)):
        raise ModelFormatError(f"{engine.path}: a score is not a number; the file is damaged: download it again")
    return Ranking(
        scores=scores,
        kind="logit" if is_encoder else "probability",
        n_tokens=tuple(map(len, prompts)),
        notes=_notes(engine, gguf, is_encoder=is_encoder),
        total_s=perf_counter() - began,
    )


def _check(query: str, documents: Sequence[str], max_document_tokens: int | None) -> None:
    if not query.strip():
        raise OptionError("query", query, "it must have at least one character")
    if len(documents) == 0:
        raise OptionError("documents", documents, "there must be at least one")
    if max_document_tokens is not None and max_document_tokens < 1:
        raise OptionError("max_document_tokens", max_document_tokens, "it must be a whole number of 1 or more")


def _notes(engine: Engine, gguf: GGUF, *, is_encoder: bool) -> tuple[str, ...]:
    """Return what a person should know of the scores."""
    if is_encoder and engine.card.architecture == "bert" and f"{_DENSE}.weight" not in gguf.tensors:
        return (
            "the file lacks the layer before the model's head (the pooler), as llama.cpp's converter leaves it out: "
            "the order is roughly right, the scores are not",
        )
    if not is_encoder and not is_ranker(gguf):
        return (
            "the file does not say that its model was trained to rank: a score is the probability that it answers yes "
            "when it is asked whether the document meets the query",
        )
    return ()


def _head(engine: Engine, gguf: GGUF, *, is_encoder: bool) -> RankHead | None:
    """Return the head to score with; None where the output matrix has the rows of yes and no.

    Raises:
        CapabilityError: The model has no head, or one with several outputs.
    """
    card = engine.card
    if not is_encoder:
        if (
            "cls.output.weight" not in gguf.tensors
            or "output.weight" in gguf.tensors
            or _is_tied(engine.tokenizer, gguf)
        ):
            return None
        if not engine.model.capabilities.taps:
            raise CapabilityError(
                f"the file of {card.name!r} has a head in place of its output matrix, and the {card.runtime} runtime "
                "does not return the states that the head reads; choose the cpu runtime, or a file with its output "
                "matrix"
            )
    head = read_rank_head(gguf, card.architecture, card.n_embd, causal=not is_encoder)
    n_out, n_expected = len(head.outputs(np.zeros(card.n_embd, np.float32))), 1 if is_encoder else 2
    if n_out != n_expected:
        raise CapabilityError(
            f"the head of {card.name!r} sorts texts into {n_out} classes, and ranking takes {n_expected}; use a "
            "reranker"
        )
    return head


def _is_tied(tokenizer: Tokenizer, gguf: GGUF) -> bool:
    """Return whether a head's rows are those of its answers in the embedding, which then is the output matrix, too.

    A converter may have put such rows in the place of an output matrix of the model's own.
    """
    name, head = "token_embd.weight", "cls.output.weight"
    answers = answer_ids(tokenizer, gguf)
    if gguf.tensors[head].shape != (gguf.tensors[name].shape[0], len(answers)):
        return False
    for i, token_id in enumerate(answers):
        head_row, tied = read_rows(gguf, head, i, 1)[0], read_rows(gguf, name, token_id, 1)[0]
        if not head_row @ tied > _SAME * np.linalg.norm(head_row) * np.linalg.norm(tied):
            return False
    return True


def answer_ids(tokenizer: Tokenizer, gguf: GGUF, unlabelled: Sequence[str] = _LABELS) -> tuple[int, int]:
    """Return the tokens of the answer that counts for a document, and of that which counts against it.

    They are the file's labels, else `unlabelled`.

    Raises:
        CapabilityError: The answers are not two of one token each.
    """
    architecture = gguf.metadata.get("general.architecture")
    labels = get_array(gguf, f"{architecture}.classifier.output_labels", frozenset({ValueType.STRING}))
    answers = unlabelled if labels is None else [label.decode(errors="replace") for label in labels.strings()[:3]]
    ids = [tokenizer.encode(answer, add_special=False) for answer in answers]
    if len(ids) != 2 or any(len(each) != 1 for each in ids) or ids[0] == ids[1]:
        shown = " and ".join(map(repr, answers))[:80]
        raise CapabilityError(f"ranking needs two answers of one token each, and the model has {shown}; use a reranker")
    return ids[0][0], ids[1][0]


def outputs_of(work: Work, head: RankHead, norm: FinalNorm | None) -> list[F64]:
    """Return the head's outputs for each prompt; `norm` is the final norm of a decoder, None for an encoder."""
    outputs: list[F64] = []
    with work.engine.pool.turn(work.cancel) as slot:
        work.cancel.check("the ranking")
        assert slot is not None, "only cancelling ends the waiting"
        with work.cancel.calling(slot.session.cancel):
            for ids in work.prompts:
                outputs.append(head.outputs(embed_on(slot, ids, head.pooling, norm, work.n_first)))
                work.done(len(outputs))
    return outputs


def by_answers(work: Work, answers: tuple[int, int]) -> tuple[float, ...]:
    """Return the probability of the first answer among the two, for each document."""
    yes, no = answers
    scores: dict[int, float] = {}

    def take(i: int, logits: NDArray[np.float32]) -> None:
        scores[i] = sigmoid(float(logits[yes]) - float(logits[no]))
        work.done(len(scores))

    _read(work, take)
    return tuple(scores[i] for i in range(len(scores)))


def _read(work: Work, take: Callable[[int, NDArray[np.float32]], None]) -> None:
    """Call `take` with each document's index and f32[n_vocab], the logits behind its last token, valid for the call.

    What all documents have in common is read once. Where a row does not depend on what else is in its forward, several
    documents share forwards; those that the memory plan has no room for beside others are read alone.
    """
    engine, prompts = work.engine, work.prompts
    groups, alone = list[list[int]](), list(range(len(prompts)))
    n_shared = min(len(ids) for ids in prompts) - 1
    for ids in prompts:
        n_shared = n_common(prompts[0], ids, n_shared)
    if len(prompts) > 1 and n_shared > 0 and are_together(engine.pool.slots[0].session):
        groups, alone = _groups(work, n_shared)
    if groups:
        with branches(engine, prompts[0][:n_shared], cancel=work.cancel, on_progress=work.on_progress) as opened:
            for group in groups:
                names = opened.fork(opened.root, len(group))
                forwards = opened.forward({name: prompts[i][n_shared:] for name, i in zip(names, group, strict=True)})
                for name, i in zip(names, group, strict=True):
                    opened.drop(name)
                    take(i, forwards[name][0])
    for i in alone:
        request = engine.requests.plain(prompts[i], {})
        with prompt_read(engine.pool, request, work.cancel, work.on_progress) as prompt:
            take(i, prompt.forward.logits[0])


def _groups(work: Work, n_shared: int) -> tuple[list[list[int]], list[int]]:
    """Return which documents share forwards, in their order, and those that are read alone."""
    slot = work.engine.pool.slots[0]
    room = tokens_behind(slot, n_shared)
    most = _MOST_TOGETHER if slot.text_rows is None else max(1, min(_MOST_TOGETHER, slot.text_rows))
    groups: list[list[int]] = []
    alone: list[int] = []
    n_rows = n_held = 0
    for i, ids in enumerate(work.prompts):
        n_new, n_each = len(ids) - n_shared, PAGE_TOKENS * n_pages(n_shared, len(ids))
        if room is not None and n_each > room:
            alone.append(i)
            continue
        fits = room is None or n_held + n_each <= room
        if not groups or n_rows + n_new > _ROWS or len(groups[-1]) >= most or not fits:
            groups.append([])
            n_rows = n_held = 0
        groups[-1].append(i)
        n_rows, n_held = n_rows + n_new, n_held + n_each
    return groups, alone
