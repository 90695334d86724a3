"""Weights in the order in which the kernels read them: the files that hold them, how they are made and streamed."""
