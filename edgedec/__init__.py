"""edgedec: the same text, sooner, within the memory you allow."""
