"""What a person sees of the library's log: all of it with --verbose, else the warnings of some loggers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgedec_apps.cli.shown.terminal import one_line, say


class _SayingHandler(logging.Handler):
    """Prints each log record as a line on standard error, whatever a client or a model's metadata put into it."""

    def __init__(self, name: str | None = None, before: Callable[[], None] | None = None) -> None:
        """Print each record behind `name`, by default its logger's; `before` is called before each."""
        super().__init__()
        self._name, self._before = name, before

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        if self._before is not None:
            self._before()
        say(one_line(f"{self._name or record.name}: {record.getMessage()}"))


class _KeepingHandler(logging.Handler):
    """Keeps the message of each warning, and of each record with a true attribute `tell`, once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: dict[str, None] = {}  # in their order

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
def telling_of_losses(*, quiet: bool = False, before: Callable[[], None] | None = None) -> Iterator[None]:
    """Print inside the block at once that a model was lost, and that it is back; `before` is called before a line."""
    logger = logging.getLogger("edgedec.decoding.generate")
    handler = logging.NullHandler() if quiet else _SayingHandler("edgedec", before)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


@contextmanager
def warnings_of(*names: str) -> Iterator[list[str]]:
    """Yield a list; after the block it has the warnings, and other messages for a person, of some loggers."""
    handler, messages = _KeepingHandler(), list[str]()
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
        messages += handler.messages
