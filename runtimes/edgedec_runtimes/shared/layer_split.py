"""Which devices take how many layers: as many as their memory allows, the last layers on the devices that are nearest.

Devices take layers in one order, with the host's first (LoadOptions.layer_split). They are filled from the last one on,
which has the output matrix: devices of other machines come first in that order, and so get what the others can't take.
"""

from collections.abc import Sequence

from edgedec.memory_plan import IsOver, Split, n_split


def split_layers(names: Sequence[str], n_layers: int, is_over: IsOver) -> Split:
    """Return the split that puts the most layers on devices, at most `n_layers`, with none of them over its cap.

    Args:
        names: The devices in the order of the layers.
        n_layers: Layers that are wanted on devices.
        is_over: Tells whether a device is over its cap. More layers never take less.
    """
    counts = dict.fromkeys(names, 0)

    def split() -> Split:
        return tuple((name, counts[name]) for name in names if counts[name])

    for name in reversed(names):
        least = most = n_layers - sum(counts.values())
        counts[name] = most
        if most and is_over(split(), name):  # mostly all fit
            least, most = 0, most - 1
        while least < most:
            counts[name] = (least + most + 1) // 2
            if is_over(split(), name):
                most = counts[name] - 1
            else:
                least = counts[name]
        counts[name] = least
    # A device that was filled later may have made another one hold more, such as copies of inputs.
    while over := next((name for name, _ in split() if is_over(split(), name)), None):
        counts[over] -= 1
    return split()


def whole_split(names: Sequence[str], n_layers: int, is_over: IsOver) -> Split:
    """Return a split of exactly `n_layers` layers: as split_layers, with what is left over on the first device."""
    split = dict(split_layers(names, n_layers, is_over))
    split[names[0]] = split.get(names[0], 0) + n_layers - n_split(tuple(split.items()))
    return tuple((name, split[name]) for name in names if split.get(name))
