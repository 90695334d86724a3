"""From what a caller gives, a prompt and options, to a request that can be generated."""

import secrets
from dataclasses import replace
from typing import cast

from edgedec.api.request_options import (
    Prompt,
    RequestOptions,
    SamplingOptions,
    as_token_ids,
    predicted_ids,
    require_rule,
)
from edgedec.constraint import OpenConstraint
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.prompt_length import encode_prompt
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import RequestError
from edgedec.grammar import chosen_grammar
from edgedec.model import Model
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED, Request


class Requests:
    """Makes the requests for one loaded model.

    Args:
        model: The model.
        slot: One of its sessions, which says how long a text may be.
        grammars: The grammars that were compiled for it.
    """

    def __init__(self, model: Model, slot: SessionSlot, grammars: Grammars) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._slot = slot
        self._grammars = grammars

    @property
    def _n_prompt_max(self) -> int:
        return self._slot.session.n_text_max - 1

    def sampling(self, options: SamplingOptions) -> SamplingParams:
        """Return sampling parameters: the options given, then the model's own defaults, then edgedec's.

        Raises:
            RequestError: An option is unknown or out of range.
        """
        unknown = set(options) - set(SamplingParams.names())
        if unknown:
            raise RequestError(
                f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(SamplingParams.names())}; of a "
                f"request also {', '.join(sorted(set(RequestOptions.__annotations__) - set(SamplingParams.names())))}"
            )
        return replace(replace(SamplingParams(), **self._model.card.sampling_defaults), **options)  # type: ignore[arg-type]

    def wanted(self, prompt: Prompt, options: RequestOptions) -> tuple[Request, OpenConstraint]:
        """Return the request that options stand for, and what opens the grammar of a text of it."""
        reuse, draft, rule = options.pop("reuse", "exact"), options.pop("draft", True), options.pop("verify", COUPLED)
        grammar = chosen_grammar(options.pop("grammar", None), options.pop("json_schema", None))
        methods = dict(options.pop("methods", {}))
        if (predicate := options.pop("predicate", None)) is not None:
            methods["predicate"] = predicate
        if (close := options.pop("json_close", False)) is not False:
            methods["json_close"] = close
        if (futures := options.pop("futures", None)) is not None:
            methods["futures"] = futures
        defaults: dict[str, float] = {}
        for name, value in methods.items():
            defaults |= self._grammars.method(name).draw(value)
        predicted = predicted_ids(self._tokenizer, options.pop("prediction", None), self._slot.session.n_ctx)
        begun_ids = as_token_ids(options.pop("resume", ()))
        request = self.plain(prompt, cast(SamplingOptions, {**defaults, **options}))
        require_rule(rule)
        request = replace(
            request, reuse=reuse, draft=draft, rule=rule, predicted_ids=predicted, begun_ids=begun_ids, methods=methods
        )
        return request, lambda: self._grammars.open(grammar, request)

    def plain(self, prompt: Prompt, options: SamplingOptions) -> Request:
        """Return the plain request for a prompt, with a seed drawn where none is given."""
        card = self._model.card
        if card.pooling is not None or self._model.capabilities.final_states:
            raise RequestError(
                f"{card.name!r} is an embedding model: use embed() (edgedec embed), or load one that writes texts"
            )
        token_ids, sampling = self.prompt_ids(prompt), self.sampling(options)
        return Request(token_ids, sampling, secrets.randbits(63) if sampling.seed is None else sampling.seed)

    def cut_ids(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids, cut to what fits the context; a token that ends every text stays the last one."""
        most, last = self._n_prompt_max, self._tokenizer.encode("")[-1:]
        ends = last if last == self._tokenizer.encode("a")[-1:] else []
        ids = self._tokenizer.encode(text, most=most)
        return tuple(ids) if len(ids) <= most else (*ids[: most - len(ends)], *ends)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's token ids.

        Raises:
            PromptTooLongError: The prompt is a text that does not fit the context.
            RequestError: The prompt is neither a text nor a sequence of whole numbers.
        """
        if isinstance(prompt, str):
            return tuple(encode_prompt(self._tokenizer, prompt, self._n_prompt_max))
        return as_token_ids(prompt)
