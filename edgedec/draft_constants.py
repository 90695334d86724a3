"""The constants by which it is decided what to draft, each with its unit and its reason.

`edgedec.scheduler.estimator` has the mathematics that they stand in. A ratio of a price or of a gain has no unit.
How the cost curve is measured at load stands in `edgedec.sessions.cost_probe`, how long a plug-in may take to begin in
`edgedec.scheduler.plugin_guard`.
"""

# What is measured

SAMPLES = 15
"""Samples that a median is taken of: so few that it follows a machine that throttles within a second."""
SURE = 3
"""Samples from which a measurement is believed, as one of them may be disturbed; late drafts that end a plug-in."""
ODD = 4.0
"""Times the expected seconds that a sample counts as at most: more is a suspended process or a busy machine."""
BUCKET = 512
"""Tokens of context below which a forward costs about the same, then by doubling; a draft model reads as many."""
STALE = 64
"""Steps after which the seconds of other rows count as measured at load again; a trial that lost waits as long."""
NEWEST = 1 / 8
"""Weight of the latest step in a mean: of seconds that a median would miss, as they pass in one step of three, and of
what other texts draft."""
KEPT = 0.97
"""Weight of earlier drafts in what is known of a drafter, with every draft: the last 33 decide."""
KEPT_OF_TRIALS = 0.85
"""The same after trials, which are few and far between: the last 7 decide."""
PRIOR = 6.0
"""Observations that an estimate of acceptance is worth before any is there."""
MEMORY = 250.0
"""Observations of acceptance after which old ones count half."""
MOST_P = 0.995
"""The most that a probability is corrected to: nothing is certain."""

# What counts

NEXT_TO_NOTHING = 0.01
"""Of a plain step, of a token or of a probability: what is less counts as nothing, what is looked up takes as much."""
NOTICED = 0.1
"""Of a plain step, or of a text: what is less is noise."""
GAIN = 1.03
"""Times as fast as without it that a draft model or the target's own layers must promise to be."""
CLEAR_GAIN = 1.2
"""Times its price that a draft must have been worth, or that more rows must promise: estimates are too high there."""
CAUTION = 1.5
"""Times its price that a gain must be which comes only later, or in a text whose drafts have lost time; these may lose
so many plain steps beyond their share, as a text that has just begun may draft, too."""
HOPED = 1 / 16
"""Of a plain step: what a row more costs where rows are cheap."""
ATTENDED = 0.4
"""Attention of each row behind the first one, in times of the first row's: all rows share what is read, and each row
computes for itself (measured on AVX-512 behind 8,000 tokens: 0.38 to 0.41)."""
AS_LONG = 4096
"""Behind so many tokens attention may take as long as all other work of a plain step, as with small models. What a step
takes beyond that is put down to a slower machine."""

# What may be lost, to find out

TRIAL_SHARE = 0.01
"""Of the time: for trials of a model that drafts, and of plain steps among drafts."""
LOOKED_UP_SHARE = 0.003
"""Of the time: for trials of a drafter that looks tokens up, as several may be at work."""
LOSS_SHARE = 0.005
"""Of the time: for trials of rows, and for the drafts of one text."""
FIRST = 8
"""Drafts, and plain steps, that are looked at before anything is judged; rows that kernels take together."""
TRIAL_STEPS = 4
"""Steps of a trial of a draft model, which first has to read; trials that may be saved up."""

# How much at once

AT_ONCE = 32
"""Nodes that a drafter which looks up is asked for; tokens that a draft model reads as a part of its next draft, and
tokens drafted that a first reading is taken to cost; steps that pass before it is looked again who is due."""
EVERY = 3
"""Steps in which a trial of rows could be made, for each that is considered: to consider it takes time, too."""
DEADLINE_S = 1.0
"""Seconds that a pinned drafter has for a draft: a person would notice more."""
