"""The cpu runtime: our own kernels, whose results for a row have the same bits whatever stands beside it.

This module imports no native code: the library is loaded when the runtime is asked for something.
"""

__all__: list[str] = []
