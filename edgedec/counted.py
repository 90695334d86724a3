"""Numbers with the noun that they count, in the singular or the plural."""


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 token" or "2 tokens"; for nouns whose plural takes an s.

    >>> counted(1, "token"), counted(0, "token"), counted(4096, "token")
    ('1 token', '0 tokens', '4096 tokens')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
