"""edgedec eval; its options are in edgedec_apps.evaluation.eval_job, and edgedec_apps.evaluation.run evaluates."""

from edgedec_apps.evaluation.eval_job import EvalJob


def command(job: EvalJob) -> None:
    """Measure what a KV type, left-out layers or another file cost in quality and bring in speed.

    Each token of a text is predicted from the true tokens before it, window by window. The baseline (KV type f16, all
    layers) comes first, then every KV type with every set of layers. --against compares MODEL, for example a
    quantization or an export, with the file that it was made from. The figures are: perplexity; mean and 99th
    percentile of the KL divergence from the baseline, in nats; how often both have the same most probable token; and
    tokens per second without drafts, decoded one at a time at the ends of the windows.
    """
    from edgedec_apps.evaluation.run import run_eval

    run_eval(job)
