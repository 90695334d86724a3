"""The marks by which models set apart what they think, as a table: a row a family, by a sign in its template."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model sets apart what it thinks.

    Attributes:
        opens: The mark before the thoughts.
        closes: The mark behind them.
        written: What is written for the model once the budget is used up: `closes`, then what begins an answer.
        then: What follows `closes` before an answer; where it is empty, white space may.
        alone: The mark with which an answer without thoughts begins; empty for none.
        gap: White space between `opens` and a thought that is written for the model.
        opened: Whether the prompt ends with `opens`.
        budget: Most tokens of the thoughts; None for any number.
    """

    opens: str
    closes: str
    written: str
    then: str = ""
    alone: str = ""
    gap: str = ""
    opened: bool = False
    budget: int | None = None

    def before_free_text(self) -> "Thoughts":
        """Return the same thoughts before a text that chooses by itself what stands behind them."""
        return replace(self, written=self.written.removesuffix(self.then), then="", alone="")


_FINAL = "<|channel|>final<|message|>"
_THEN = f"<|start|>assistant{_FINAL}"
_RESPONSE = "<|START_RESPONSE|>"
THINK = Thoughts("<think>", "</think>", "\n</think>\n\n", gap="\n")
COHERE = Thoughts("<|START_THINKING|>", "<|END_THINKING|>", "<|END_THINKING|>")
FAMILIES = {
    "[THINK]": Thoughts("[THINK]", "[/THINK]", "[/THINK]"),
    "<|channel>thought": Thoughts("<|channel>thought", "<channel|>", "\n<channel|>", gap="\n"),
    "<|channel|>analysis": Thoughts("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{_THEN}", _THEN, _FINAL),
    "<seed:think>": Thoughts("<seed:think>", "</seed:think>", "\n</seed:think>\n", gap="\n"),
    _RESPONSE: replace(COHERE, written=COHERE.closes + _RESPONSE, then=_RESPONSE, alone=_RESPONSE),
    "<|START_THINKING|>": COHERE,
    "<think>": THINK,
    "</think>": THINK,
}


def thoughts_family(template: str) -> Thoughts | None:
    """Return how the model of a chat template sets apart what it thinks; None where it does not think."""
    return next((family for sign, family in FAMILIES.items() if sign in template), None)


def thoughts_of(template: str, prompt: str, budget: int | None = None) -> Thoughts | None:
    """Return what the answer to a chat may begin with; None where the model does not think.

    Args:
        template: The source of the model's chat template.
        prompt: The rendered chat; one that ends with the closing mark has no thoughts before its answer.
        budget: Most tokens of the thoughts; None for any number.
    """
    end, family = prompt.rstrip(), thoughts_family(template)
    if family is None or end.endswith(family.closes):
        return None
    return replace(family, opened=end.endswith(family.opens), budget=budget)
