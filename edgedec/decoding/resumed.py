"""Reads a text that was begun before, so that the KV cache is as it was left: by an earlier request, or by a loss."""

import numpy as np

from edgedec.decoding.step import Decoder
from edgedec.sequence import Sequence


def reread(sequence: Sequence, decoder: Decoder) -> None:
    """Evaluate a prompt and the tokens behind it that the KV cache lacks, all but the last of them.

    Nothing is evaluated where only the last token is missing, or where nothing is written yet: the step does that.

    The prompt is evaluated at once, as it was then. The tokens behind it were written in single steps, so they are
    evaluated in pieces whose rows have the bits of single steps.

    Raises:
        What Session.forward raises.
    """
    session, n_prompt, n_all = decoder.session, len(sequence.request.prompt_ids), len(sequence.token_ids) - 1
    while n_prompt <= n_all and (n_past := sequence.n_cached) < n_all:
        if n_past < n_prompt:
            n = n_prompt - n_past
        else:
            n = min(session.exact_rows(n_past) or 1, n_all - n_past)
            n = n if n > 1 and session.has_exact_rows(n_past, n) else 1
        n_held = session.n_cached
        try:
            tokens = np.array(sequence.token_ids[n_past : n_past + n], np.int32)
            session.forward(tokens, n_past=n_past, on_progress=decoder.on_progress if n_past < n_prompt else None)
        except BaseException:  # KeyboardInterrupt too
            if session.n_cached != n_held:  # else the session still holds what it held before
                sequence.n_cached = min(session.n_cached, n_past + n)
            raise
        sequence.n_cached += n
