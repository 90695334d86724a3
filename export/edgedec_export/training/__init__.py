"""Training of draft heads: a target writes prompts and answers, and a head learns to foresee the answers.

Only `network.py`, `learning.py`, `foresight.py`, `checkpoints.py` and `teaching.py` import torch, which the extra
`train` installs; the other files run without it.
"""
