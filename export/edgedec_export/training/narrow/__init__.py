"""Training of a narrow draft model: few layers of a part of the target's width, with the target's tokenizer.

The model is an ordinary GGUF of the architecture llama, so every runtime can draft with it (direct alignment, Goel et
al. 2024, arXiv:2403.00858; FastDraft, Zafrir et al. 2024, arXiv:2411.11055). `shape.py`, `initial.py` and `gguf.py` run
without torch; `student.py` imports it.
"""
