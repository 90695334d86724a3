"""PG-TD (planning-guided decoding): a tree search over tokens whose rewards are tests that whole texts pass.

Each prefix has the model's most probable tokens as children. A prefix is judged by the text that greedy decoding makes
of it, and the next prefix to try is the one with the best known reward, the highest probability and the fewest visits
(P-UCB). For code, the reward is the share of public tests passed; running code safely is the caller's task.

Paper: Planning with Large Language Models for Code Generation, arXiv:2303.05510
Option: `--method planned:8,scorer=COMMAND`, with the texts that are tried
For: code with tests
Measured: 8 of 30 functions right for 106 plain steps; 8 texts and the same tests have 16 of these for 67, p = 0.02
    (`python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind functions --method pgtd8 --tasks 30`)
Status: study
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgedec.choosing.partial_texts import PartialText, PartialTexts, best_tokens, row_log_probs
from edgedec.choosing.scorer import TextScorer
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError

MOST_ROLLOUTS = 256
_UCB_BASE = 10.0


@dataclass(frozen=True, slots=True)
class Planning:
    """How a tree is searched.

    Attributes:
        n_rollouts: Most texts to write and judge, 1 to MOST_ROLLOUTS; 1 is greedy decoding.
        n_children: Children of a prefix, the most probable tokens; 1 to 16.
        least: A token less probable than this is no child, unless it is the most probable one.
        exploration: The weight of what is unexplored (the paper's c).
    """

    n_rollouts: int = 16
    n_children: int = 3
    least: float = 0.02
    exploration: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.n_rollouts <= MOST_ROLLOUTS:
            raise OptionError("n_rollouts", self.n_rollouts, f"it must be from 1 to {MOST_ROLLOUTS}")
        if not 1 <= self.n_children <= 16:
            raise OptionError("n_children", self.n_children, "it must be from 1 to 16")
        if not 0 <= self.least <= 1:
            raise OptionError("least", self.least, "it must be from 0 to 1")
        if not 0 <= self.exploration < math.inf:
            raise OptionError("exploration", self.exploration, "it must be from 0")

    def children(self, text: PartialText) -> list[tuple[int, float]]:
        """Return the tokens that a prefix may go on with, and their probabilities."""
        probs = np.exp(row_log_probs(text.logits))
        candidates = [(token_id, float(probs[token_id])) for token_id in best_tokens(text.logits, self.n_children)]
        return [each for i, each in enumerate(candidates) if i == 0 or each[1] >= self.least]


@dataclass(slots=True)
class _Node:
    """A prefix.

    Attributes:
        text: It; a branch of its own.
        prior: The probability of its last token.
        ahead: The greedy tokens up to the next position with several children; None where the text ends before.
        ahead_logprob: The sum of their log-probabilities.
        value: The best reward of the texts behind it.
        n_visits: How often a text behind it was judged.
        children: None until it is expanded.
    """

    text: PartialText
    prior: float
    ahead: tuple[int, ...] | None = ()
    ahead_logprob: float = 0.0
    value: float = 0.0
    n_visits: int = 0
    children: "list[_Node] | None" = None


@dataclass(slots=True)
class PlannedText:
    """What a search ends with.

    Attributes:
        text: The best text; its branch is free.
        reward: Its reward, 0 to 1.
        n_rollouts: How many texts were judged.
        rewards: The reward of each of them, in their order.
    """

    text: PartialText
    reward: float
    n_rollouts: int = 0
    rewards: list[float] = field(default_factory=list)


def planned(texts: PartialTexts, reward: TextScorer, planning: Planning) -> PlannedText:
    """Return the text with the highest reward that the search finds; a reward of 1 ends the search.

    Args:
        texts: Who holds the texts; nothing was begun there.
        reward: Judges whole texts.
        planning: How to search.
    """
    root = _Node(texts.begin(), 1.0)
    best = PlannedText(root.text, -1.0)
    _judge(texts, [root], reward, planning, best)
    root.value, root.n_visits = best.reward, 1
    while best.reward < 1 and best.n_rollouts < planning.n_rollouts:
        path = _selected(root, planning)
        leaf = path[-1]
        if leaf.ahead is None:
            break  # every text was tried
        leaf.children = _expanded(texts, leaf, planning)
        fresh = leaf.children[: planning.n_rollouts - best.n_rollouts]
        _judge(texts, fresh, reward, planning, best)
        for node in path:
            node.value = max([node.value, *(child.value for child in fresh)])
            node.n_visits += len(fresh)
        _close_ended(path)
    return best


def _selected(root: _Node, planning: Planning) -> list[_Node]:
    """Return the path from the root to the prefix that is expanded next."""
    path = [root]
    while (children := path[-1].children) is not None:
        open_ones = [child for child in children if child.ahead is not None]
        if not open_ones:
            break
        n = path[-1].n_visits
        beta = math.log((n + _UCB_BASE + 1) / _UCB_BASE) + planning.exploration

        def bound(child: _Node, n: int = n, beta: float = beta) -> float:
            return child.value + beta * child.prior * math.sqrt(math.log(max(n, 2))) / (1 + child.n_visits)

        path.append(max(open_ones, key=bound))
    return path


def _expanded(texts: PartialTexts, leaf: _Node, planning: Planning) -> list[_Node]:
    """Return a prefix's children, behind the greedy tokens up to where there are several."""
    assert leaf.ahead is not None, "a prefix whose text is over is not expanded"
    text = texts.extend(leaf.text, leaf.ahead, leaf.ahead_logprob)
    choices = planning.children(text)
    grown = texts.advance([(text, token_id) for token_id, _ in choices])
    return [_Node(each, prior) for each, (_, prior) in zip(grown, choices, strict=True)]


def _judge(
    texts: PartialTexts, nodes: Sequence[_Node], reward: TextScorer, planning: Planning, best: PlannedText
) -> None:
    """Write each prefix to its end, greedily and side by side; note rewards, and where each has several children."""
    written = [node.text if node.text.ended else texts.fork(node.text) for node in nodes]
    for node in nodes:
        node.ahead = None
    while going := [i for i, text in enumerate(written) if text.ended is None]:
        for i in going:
            node, text = nodes[i], written[i]
            if node.ahead is None and len(planning.children(text)) > 1:
                node.ahead = text.token_ids[len(node.text.token_ids) :]
                node.ahead_logprob = text.logprob - node.text.logprob
        grown = texts.advance([(written[i], best_tokens(written[i].logits, 1)[0]) for i in going])
        for i, text in zip(going, grown, strict=True):
            written[i] = text
    rewards = reward(texts, written)
    for node, text, value in zip(nodes, written, rewards, strict=True):
        node.value, node.n_visits = value, 1
        best.n_rollouts += 1
        best.rewards.append(value)
        if value > best.reward:
            best.text, best.reward = text, value
        if node.text.ended is None:
            texts.drop(text)
        if node.ahead is None:
            texts.drop(node.text)


def _close_ended(path: Sequence[_Node]) -> None:
    """Mark the prefixes behind which every text was tried."""
    for node in reversed(path):
        if node.children is not None and all(child.ahead is None for child in node.children):
            node.ahead = None


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    assert run.scorer is not None, "the search must have a scorer"
    best = planned(texts, run.scorer, Planning(n_rollouts=run.n))
    why = f"its score, {best.reward:.3f}, is the highest of the {best.n_rollouts} that were tried"
    return SearchResult((best.text,), 0, why, (best.reward,))


PLANNED = Search(_run, n=8, most=64, n_texts=lambda n: n + 4, scored="must")
"""`n` is the number of texts that are tried."""
