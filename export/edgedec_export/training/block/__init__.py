"""Block drafters: one forward drafts K tokens (DFlash, arXiv:2602.06036), each corrected by the one before it.

Only `network.py`, `learning.py` and `student.py` import torch.
"""
