"""Training of drafters: a target writes prompts and answers, and a head or a narrow model learns from the answers.

Only `arithmetic.py`, `network.py`, `learning.py`, `optimizing.py`, `head_student.py`, `checkpoints.py`,
`teaching.py`, `narrow/student.py`, `block/network.py` and `block/student.py` import torch, which the extra `train`
installs; the other files run without it.
"""
