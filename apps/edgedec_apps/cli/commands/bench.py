"""edgedec bench; its options are in edgedec_apps.bench.job, and edgedec_apps.bench.run measures."""

from edgedec_apps.bench.job import BenchJob


def command(job: BenchJob) -> None:
    """Measure how fast a model decodes with drafts and without, per task, and whether the texts are equal.

    Every prompt runs with drafts, without drafts, and without drafts once more, in changing order; the difference of
    the last two is noise. --plot draws tokens/s by task, beside plain decoding and llama.cpp where --against measures
    it; the black bars are the noise.
    """
    from edgedec_apps.bench.run import run_bench

    run_bench(job)
