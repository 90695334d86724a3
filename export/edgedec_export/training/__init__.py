"""Training of drafters: a target writes prompts and answers, and a head or a narrow model learns from the answers.

Only `arithmetic.py`, `network.py`, `learning.py`, `optimizing.py`, `head_student.py`, `checkpoints.py`,
`teaching.py`, `narrow/student.py`, `block/network.py`, `block/student.py`, `rows/llama.py`, `rows/student.py`,
`rows/soft_prompt.py` and `exits/student.py` import torch, which the extra `train` installs; the other
files run without it.
"""
