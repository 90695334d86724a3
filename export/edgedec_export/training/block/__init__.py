"""Block drafters (DFlash, arXiv:2602.06036): one forward scores K tokens, and the Markov head lets each heed the last.

Only `network.py` and `student.py` import torch.
"""
