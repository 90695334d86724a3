"""Adapters as people write them: a file or a folder, perhaps with its scale."""


def adapter(given: str) -> tuple[str, float]:
    """Return an adapter and its scale, from a text such as "tone.gguf=0.5"; the scale is 1 where none is given.

    >>> adapter("a=b.gguf=0.5"), adapter("a=b.gguf")
    (('a=b.gguf', 0.5), ('a=b.gguf', 1.0))
    """
    name, _, scale = given.rpartition("=")
    try:
        return name, float(scale)
    except ValueError:
        return given, 1.0
