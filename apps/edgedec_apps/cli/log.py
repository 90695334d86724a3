"""The library's log, as far as a person sees it: all of it with --verbose, else what a person should know."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from edgedec_apps.cli.terminal import say


class _SayingHandler(logging.Handler):
    """Passes log records on to the person; a model's metadata among them can't reach the terminal as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        say(f"{record.name}: {record.getMessage()}")


class _KeepingHandler(logging.Handler):
    """Keeps the messages of warnings, and of records with a true attribute `tell`, each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: dict[str, None] = {}  # in order

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        if record.levelno >= logging.WARNING or getattr(record, "tell", False):
            self.messages[record.getMessage()] = None


def show_log() -> None:
    """Print the log from now on."""
    logger = logging.getLogger("edgedec")
    logger.setLevel(logging.INFO)
    logger.handlers = [_SayingHandler()]
    logger.propagate = False


@contextmanager
def warnings_of(*names: str) -> Iterator[list[str]]:
    """Yield a list that holds, after the block, what loggers warned of or told a person in it, each message once."""
    handler, found = _KeepingHandler(), list[str]()
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
        found += handler.messages
