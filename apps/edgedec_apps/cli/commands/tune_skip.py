"""edgedec tune-skip; its options are in edgedec_apps.evaluation.eval_job, and .tune_skip beside them searches."""

from edgedec_apps.evaluation.eval_job import TuneJob


def command(job: TuneJob) -> None:
    """Search for the half-layers that a model drafts best without, and keep the set for --draft skip.

    A half-layer is the attention or the feed-forward block of a layer. A draft continues a text that the whole model
    has read; with --lossy every token goes through the set, and the search is another one. The set is compared with
    evenly spaced layers, late layers and an early exit that read as many bytes: how often each has the whole model's
    most probable token, and its KL divergence from the whole model in nats. The same seed finds the same set, unless
    --seconds ends the search.
    """
    from edgedec_apps.evaluation.tune_skip import run_tune_skip

    run_tune_skip(job)
