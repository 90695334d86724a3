"""Tree of steps (after DTS): texts are written from a tree of first steps, where what came of earlier ones is known.

A node is a text in the middle of its writing. Each text goes down from the root to the child with the greatest value;
where the children of a node are no more than the square root of its visits, it is written on from there instead, by
draws of its own, and its first four steps become nodes. The score of its end becomes part of the values of all nodes
above: a value v has exp(10 v) as the mean over its children. The nodes of DTS are the passes of denoising; of a model
that denoises blocks, these are the states between some of them. In every other model they are steps, too.

Paper: after Diffusion Tree Sampling (DTS, its search), arXiv:2506.20701
Option: `--method tree:8`, with the texts
For: a scorer of whole texts, as a checker; diffusion language models and others
Measured: by a probe 16 of 20 word problems right for 289 plain steps, the likeliest of eight 17 for 86 (`python
    benchmarks/answers/better_answers.py search MODEL --kind arithmetic --method tree8 --scorer probe:FILE`)
Status: study
"""

from dataclasses import dataclass, field

import numpy as np

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec_methods.sampled_steps import Steps, steps_of, write_steps
from edgedec_methods.step_scores import elected, scorer_of

DEPTH, SHARPNESS = 4, 10.0


@dataclass(slots=True)
class Node:
    """A text in the middle of its writing.

    Attributes:
        children: The nodes one step further.
        scores: The scores of the whole texts whose last node this is.
        n_visits: How many whole texts begin with this node's text.
    """

    text: PartialText
    children: "list[Node]" = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    n_visits: int = 0

    @property
    def value(self) -> float:
        """The soft mean of what came of it."""
        values = np.array([child.value for child in self.children] or self.scores)
        most = float(values.max())
        return most + float(np.log(np.exp(SHARPNESS * (values - most)).mean())) / SHARPNESS


def written(texts: PartialTexts, n: int, steps: Steps, scorer: TextScorer) -> list[tuple[PartialText, float]]:
    """Return `n` texts with their scores, in the order of their writing.

    Args:
        texts: Who holds them; nothing was begun there.
        n: How many.
        steps: How steps are written; text i draws with `steps.seed + i`.
        scorer: Scores a text at its end.
    """
    root, leaves = Node(texts.begin()), list[tuple[PartialText, float]]()
    for i in range(n):
        path, seeds = [root], [steps.seed + i]
        while len(path) <= DEPTH and len(path[-1].children) ** 2 > path[-1].n_visits:
            going = [child for child in path[-1].children if child.text.ended is None]
            if not going:
                break
            path.append(max(going, key=lambda child: child.value))
        while path[-1].text.ended is None and len(path) <= DEPTH:
            fork = texts.fork(path[-1].text)
            (text,) = write_steps(texts, [fork], steps.params, seeds, separator=steps.separator, most=steps.most)
            path[-1].children.append(Node(text))
            path.append(path[-1].children[-1])
        whole = path[-1].text
        if whole.ended is None:
            (whole,) = write_steps(texts, [texts.fork(whole)], steps.params, seeds, separator=None)
        (score,) = scorer(texts, [whole])
        texts.drop(whole)
        path[-1].scores.append(score)
        for node in path:
            node.n_visits += 1
        leaves.append((whole, score))
    return leaves


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    best = written(texts, run.n, steps_of(run), scorer_of(run))
    return elected(texts, [text for text, _ in best], [score for _, score in best], run)


TREE = Search(_run, n=8, most=32, n_texts=lambda n: DEPTH * n + 2, draws=True, scored="may")
"""`n` is the number of texts; the one with the caller's highest score is chosen, else the vote."""
