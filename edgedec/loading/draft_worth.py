"""Whether a draft model can pay beside its target at all: estimated before it is loaded, or timed afterwards."""

from dataclasses import dataclass
from pathlib import Path

from edgedec.cost_curve import CostCurve
from edgedec.errors import EdgedecError
from edgedec.gguf.file import is_onnx
from edgedec.gguf.layer_bytes import layer_bytes


@dataclass(frozen=True, slots=True)
class TokenTime:
    """What a draft model takes for a token.

    Attributes:
        seconds: Seconds for each token.
        text: The same for a person, as what is said of "each token that it drafts".
    """

    seconds: float
    text: str


def expected_time(draft: Path, target: Path, curve: CostCurve, share: float = 1.0) -> TokenTime | None:
    """Return what a draft model is expected to take on the device of its target: as it reads fewer bytes, less time.

    None where a header or the measured curve does not say it. Of a target on another device, its time says nothing.

    Args:
        draft: The draft model's file.
        target: The target's file.
        curve: The measured cost of the target's forwards.
        share: The share of the target's bytes that a token reads, below 1 where layers are left out.
    """
    whole_s, part = curve.seconds(1), relative_bytes(draft, target)
    if whole_s is None or part is None:
        return None
    seconds = whole_s * part / share
    how = f"as it reads {part / share:.2f} of the model's bytes"
    return TokenTime(seconds, f"is expected to take {1000 * seconds:.1f} ms, {how}")


def measured_time(seconds: float) -> TokenTime:
    """Return what a loaded draft model was measured to take.

    >>> measured_time(0.0125).text
    'takes 12.5 ms, as measured'
    """
    return TokenTime(seconds, f"takes {1000 * seconds:.1f} ms, as measured")


def why_it_cannot_pay(token: TokenTime | None, curve: CostCurve, n_max: int, *, overlap: bool = False) -> str | None:
    """Return why a draft model can't pay even if every token of its drafts is accepted; None where it may pay.

    Args:
        token: What the draft model takes for a token; None where that is not known.
        curve: The measured cost of the target's forwards.
        n_max: Most nodes of a draft.
        overlap: Whether the draft model drafts while the target verifies.
    """
    if n_max < 1:
        return "no two rows are known to have the bits of single steps"
    whole_s = curve.seconds(1)
    if whole_s is None or token is None or curve.is_unknown(2):
        return None
    gain, n = best_gain(token.seconds, curve, n_max, overlap=overlap)
    if round(gain, 6) > 1.0:
        return None
    times = curve.seconds(n + 1) or 0.0
    return (
        f"each of its tokens {token.text}; at best, with {n} a step that are all right, decoding is "
        f"{gain:.2f} times as fast (1 row takes {1000 * whole_s:.1f} ms, {n + 1} rows {1000 * times:.1f})"
    )


def best_gain(token_s: float, curve: CostCurve, n_max: int, *, overlap: bool = False) -> tuple[float, int]:
    """Return the gain of drafts of the best length that are always accepted, and this length.

    The gain is how many times as fast as plain decoding they are. The arguments are those of why_it_cannot_pay(), but
    `token_s` is the seconds that drafting a token takes.

    >>> best_gain(0.05, CostCurve({1: 0.1, 2: 0.11, 3: 0.12}), 2)
    (1.3636363636363638, 2)
    >>> best_gain(0.10, CostCurve({1: 0.1, 2: 0.11, 3: 0.12}), 2)[0] < 1
    True
    """
    cost = curve.up_to(n_max + 1)
    seconds = [(max(n * token_s, cost[n]) if overlap else n * token_s + cost[n]) / (n + 1) for n in range(1, n_max + 1)]
    least = min(seconds)
    return cost[0] / least, 1 + seconds.index(least)


def relative_bytes(draft: Path, target: Path) -> float | None:
    """Return the bytes of weights that a token of the draft model reads, relative to those of its target.

    Of a mixture of experts, those that a token goes through count, as they do in the measured time of one row. None
    where a header can't be read, or the formats differ.
    """
    if is_onnx(draft) != is_onnx(target):
        return None
    try:
        return layer_bytes(draft).total / layer_bytes(target).total
    except (EdgedecError, ZeroDivisionError):
        return None
