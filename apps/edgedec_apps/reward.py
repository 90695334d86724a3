"""A reward model as a scorer: a head with one output or two classes, or the token with which it answers, says how good.

It is read as a ranker is. The question and the answer so far stand in the file's template for ranking; without one they
are two turns of the model's chat, the second of which goes on. A model without a head is then asked about the answer.
Process reward models with a head are of the first kind (arXiv:2501.07301), those that answer "+" or "-" of the second
(Math-Shepherd, arXiv:2312.08935): their file has a template, and the two answers as labels of a classifier.
"""

from collections.abc import Sequence

import numpy as np

from edgedec.api.engine import Engine
from edgedec.choosing.scorer import Scorer
from edgedec.errors import CapabilityError
from edgedec.gguf.file import GGUF, read_header_of
from edgedec.gguf.metadata import get_array, get_text
from edgedec.gguf.values import ValueType
from edgedec.progress import CancelToken
from edgedec_apps.rank_prompts import DOCUMENT, QUERY, TEMPLATE, question_form
from edgedec_apps.ranking import RankHead, Work, answer_ids, by_answers, outputs_of, rank, read_rank_head, sigmoid
from edgedec_runtimes.shared.final_norm import read_final_norm

ASKED = "Is the answer above right so far? Reply with one letter: A for yes, B for no."
_GOOD = ("yes", "good", "right", "correct", "true", "positive", "+", "1", "label_1")


def reward_scorer(engine: Engine, cancel: CancelToken | None = None) -> Scorer:
    """Return a scorer by a loaded reward model: the chance, 0 to 1, that it gives each text behind the question.

    Args:
        engine: The reward model; it is not the one that writes, whose turn would not end.
        cancel: Stops the scoring, from any thread.

    Raises:
        CapabilityError: The model has neither a head of one or two outputs nor a template to be asked with.
    """
    gguf, stop = read_header_of(engine.path), cancel or CancelToken()
    if engine.model.capabilities.final_states:  # a cross-encoder
        return lambda prefix, steps: rank(engine, prefix, steps, cancel=stop).normalized
    head = _head(engine, gguf)
    of_file = get_text(gguf, TEMPLATE)
    if of_file is None and engine.template is None:
        raise CapabilityError(
            f"the model {engine.card.name!r} has no template for ranking and no chat template, so it can't be asked "
            "about a text; use a reward model whose file has one"
        )
    template = _turns(engine, asks=head is None) if of_file is None else of_file
    norm = None if head is None else read_final_norm(engine.path)
    letters = ("A", "B") if of_file is None else ("yes", "no")
    answers = None if head is not None else answer_ids(engine.tokenizer, gguf, letters)
    good = _good_class(gguf)

    def score(prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        form = question_form(engine.tokenizer, template, prefix, engine.requests.n_prompt_max, engine.card.n_ctx_train)
        work = Work(engine, [form(step, None) for step in steps], None, stop, None)
        if head is None:
            assert answers is not None, "a model without a head has answers"
            return by_answers(work, answers)
        outputs = outputs_of(work, head, norm)
        return [sigmoid(float(x[good] - x[1 - good]) if len(x) == 2 else float(x[0])) for x in outputs]

    return score


def _head(engine: Engine, gguf: GGUF) -> RankHead | None:
    """Return the head of a model that writes; None where it has its output matrix (CapabilityError: another head)."""
    card = engine.card
    if "cls.output.weight" not in gguf.tensors or "output.weight" in gguf.tensors:
        return None
    if not engine.model.capabilities.taps:
        raise CapabilityError(
            f"the file of {card.name!r} has a head, and the {card.runtime} runtime does not return the states that it "
            "reads; choose the cpu runtime"
        )
    head = read_rank_head(gguf, card.architecture, card.n_embd, causal=True)
    n_out = len(head.outputs(np.zeros(card.n_embd, np.float32)))
    if n_out > 2:
        raise CapabilityError(f"the head of {card.name!r} has {n_out} outputs; a reward model has one, or two classes")
    return head


def _good_class(gguf: GGUF) -> int:
    """Return which of two classes is the good one: the one whose label says so, else the second."""
    architecture = gguf.metadata.get("general.architecture")
    labels = get_array(gguf, f"{architecture}.classifier.output_labels", frozenset({ValueType.STRING}))
    names = [] if labels is None else [label.decode(errors="replace").strip().lower() for label in labels.strings()[:2]]
    return next((i for i, name in enumerate(names) if name in _GOOD), 1)


def _turns(engine: Engine, *, asks: bool) -> str:
    """Return the chat template's turns with places for the question and the answer, which the user then asks about."""
    messages = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": DOCUMENT}]
    if asks:
        return engine.requests.render([*messages, {"role": "user", "content": ASKED}])
    before, place, _ = engine.requests.render(messages).partition(DOCUMENT)
    return before + place
