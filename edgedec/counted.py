"""Numbers with the thing counted, in the singular or the plural."""


def counted(n: int, noun: str) -> str:
    """Return "1 token", "2 tokens": for nouns that take an s.

    >>> counted(1, "token"), counted(0, "token"), counted(4096, "token")
    ('1 token', '0 tokens', '4096 tokens')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
