"""Errors as HTTP answers: a status, and OpenAI's, Anthropic's or ollama's form of an error."""

from dataclasses import dataclass
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

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
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
    """A refused request, with what the answer needs.

    Attributes:
        status: The HTTP status.
        code: A short name for programs, or None.
        param: The field of the request that is at fault, or None.
        retry_after_s: Seconds after which to try again, or None.
    """

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
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def closing_error() -> ApiError:
    """Return the error of requests that arrive or run while the server ends."""
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after_s=5)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as an answer: a message for a person, and the attributes of ApiError and PromptTooLongError."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    n_tokens: int = 0
    n_most: int = 0

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
        message = words + self.message if self.n_tokens else self.message
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return Anthropic's form."""
        usual = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status) or _KINDS.get(self.status, usual)
        size = f"{self.n_tokens} tokens > {self.n_most} maximum: " if self.n_tokens else ""
        words = f"prompt is too long: {size}" if self.code == _TOO_LONG else ""
        return {"type": "error", "error": {"type": kind, "message": words + self.message}, "request_id": None}

    def ollama(self) -> dict[str, Any]:
        """Return ollama's form."""
        return {"error": self.message}

    def document(self, path: str) -> dict[str, Any]:
        """Return the form of the interface that an address belongs to."""
        if "/messages" in path:
            return self.anthropic()
        return self.ollama() if path.startswith("/api/") else self.openai()


def too_long_field(error: PromptTooLongError, param: str) -> ApiError:
    """Return the error of a text that does not fit as one about the field of the request that holds the text."""
    problem = problem_of(error)
    return ApiError(problem.message, code=problem.code, param=param)


def problem_of(error: BaseException) -> Problem:
    """Return the answer to an error; for one that is not an EdgedecError it names only the type.

    >>> problem_of(PromptTooLongError("too long")).code
    'context_length_exceeded'
    """
    if isinstance(error, ApiError):
        return Problem(error.status, str(error), error.code, error.param, error.retry_after_s)
    if isinstance(error, TimeoutError):
        return Problem(504, "the request took longer than the server allows (--timeout)", "timeout")
    if not isinstance(error, EdgedecError):
        return Problem(500, f"internal error: {type(error).__name__}", "internal_error")
    if isinstance(error, PromptTooLongError):
        words = error.naming(_OPTIONS)
        return Problem(400, words, _TOO_LONG, "messages", n_tokens=error.n_tokens, n_most=error.n_most)
    if isinstance(error, ModelNotFoundError):
        return Problem(404, str(error), "model_not_found", "model")
    if isinstance(error, ModelFormatError):
        return Problem(404, str(error), "model_damaged", "model")
    if isinstance(error, RequestError):
        return Problem(400, error.naming(_OPTIONS))
    if isinstance(error, RuntimeLostError):  # the next request loads the model again
        return Problem(503, str(error), "model_lost", retry_after_s=10)
    if isinstance(error, RuntimeUnavailableError | CapabilityError | UnsupportedModelError):
        return Problem(501, str(error), "not_supported")
    if isinstance(error, OfflineError | PullError):
        return Problem(502, str(error), "pull_failed")
    if isinstance(error, CancelledError | SessionError | MemoryCapError):
        return Problem(503, str(error), "unavailable", retry_after_s=1)
    return Problem(500, str(error))
