"""The limits that a process sets itself before it runs what it does not trust. This file imports nothing of edgedec."""

from contextlib import suppress


def limit(cpu_s: int, **n_bytes: int) -> None:
    """Let this process compute for `cpu_s` seconds; its system ends it then. Systems without limits set none.

    Args:
        cpu_s: The seconds.
        n_bytes: What else is limited, by the end of its name in Python's module `resource`: DATA, AS, FSIZE.
    """
    with suppress(ImportError, OSError, ValueError):
        import resource

        for name, most in {"CPU": cpu_s, **n_bytes}.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
