"""Values of options that are typed as text."""


def parsed(text: str) -> int | float | bool | str:
    """Return a number or a truth value that a text stands for, else the text.

    >>> parsed("5"), parsed("0.5"), parsed("true"), parsed("five")
    (5, 0.5, True, 'five')
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
