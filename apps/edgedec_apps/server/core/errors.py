"""Errors as HTTP answers: a status, and OpenAI's, Anthropic's or ollama's form of an error."""

from typing import Any

from edgedec.decoding.prompt_length import CUT_DOCUMENT, CUT_TEXT
from edgedec.errors import (
    CancelledError,
    CapabilityError,
    EdgedecError,
    MemoryCapError,
    ModelFormatError,
    ModelNotFoundError,
    OfflineError,
    PromptTooLongError,
    PullError,
    RequestError,
    RuntimeLostError,
    RuntimeUnavailableError,
    SessionError,
    UnsupportedModelError,
)

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_TOO_LONG = "context_length_exceeded"  # OpenAI's code; its clients and Anthropic's look for words in the message, too
_ANTHROPIC_KINDS = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_OPTIONS = {
    "n_ctx": "--context",
    "slide": "--method slide",
    "chat_template": "--chat-template",
    CUT_TEXT: "truncate of /api/embed",
    CUT_DOCUMENT: "truncate",
}


class ApiError(RequestError):
    """A refused request, and an error as an answer, with what the answer needs.

    Attributes:
        status: The HTTP status.
        code: A short name for programs, or None.
        param: The field of the request that is at fault, or None.
        retry_after_s: Seconds after which to try again, or None.
        n_tokens: Tokens of a prompt that is too long; else 0.
        n_most: The most that it may have.
    """

    n_tokens = n_most = 0

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tell a client what to do."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def openai(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        words = f"This model's maximum context length is {self.n_most + 1} tokens. "
        words += f"However, your messages resulted in {self.n_tokens} tokens: "
        message = words + str(self) if self.n_tokens else str(self)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return Anthropic's form."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status) or _KINDS.get(self.status, usual)
        size = f"{self.n_tokens} tokens > {self.n_most} maximum: " if self.n_tokens else ""
        words = f"prompt is too long: {size}" if self.code == _TOO_LONG else ""
        error: dict[str, Any] = {"type": kind, "message": words + str(self)}
        if self.code is not None:
            error["details"] = {"error_code": self.code}  # by which Anthropic's client decides what to try next
        return {"type": "error", "error": error, "request_id": None}

    def ollama(self) -> dict[str, Any]:
        """Return ollama's form."""
        return {"error": str(self)}

    def document(self, path: str) -> dict[str, Any]:
        """Return the form of the interface that an address belongs to."""
        if "/messages" in path:
            return self.anthropic()
        return self.ollama() if path.startswith("/api/") else self.openai()


def closing_error() -> ApiError:
    """Return the error of requests that arrive or run while the server ends."""
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after_s=5)


def too_long_field(error: PromptTooLongError, param: str) -> ApiError:
    """Return the error of a text that does not fit as one about the field of the request that holds the text."""
    return ApiError(error.naming(_OPTIONS), code=_TOO_LONG, param=param)


_RETRIES: dict[str, int] = {"model_lost": 10, "unavailable": 1}  # the next request loads a lost model again
# The first row that an error is of: status, code and field.
_ANSWERS: tuple[tuple[tuple[type[EdgedecError], ...], int, str | None, str | None], ...] = (
    ((PromptTooLongError,), 400, _TOO_LONG, "messages"),
    ((ModelNotFoundError,), 404, "model_not_found", "model"),
    ((ModelFormatError,), 404, "model_damaged", "model"),
    ((RequestError,), 400, None, None),
    ((RuntimeLostError,), 503, "model_lost", None),
    ((RuntimeUnavailableError, CapabilityError, UnsupportedModelError), 501, "not_supported", None),
    ((OfflineError, PullError), 502, "pull_failed", None),
    ((CancelledError, SessionError, MemoryCapError), 503, "unavailable", None),
    ((EdgedecError,), 500, None, None),
)


def problem_of(error: BaseException) -> ApiError:
    """Return the answer to an error; for one that is not an EdgedecError it names only the type.

    >>> problem_of(PromptTooLongError("too long")).code
    'context_length_exceeded'
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than the server allows (--timeout)", status=504, code="timeout")
    if not isinstance(error, EdgedecError):
        return ApiError(f"internal error: {type(error).__name__}", status=500, code="internal_error")
    status, code, param = next(row[1:] for row in _ANSWERS if isinstance(error, row[0]))
    message = error.naming(_OPTIONS) if isinstance(error, RequestError) else str(error)
    answer = ApiError(message, status=status, code=code, param=param, retry_after_s=_RETRIES.get(code or ""))
    if isinstance(error, PromptTooLongError):
        answer.n_tokens, answer.n_most = error.n_tokens, error.n_most
    return answer
