"""Tokenizers built from a GGUF's own vocabulary, without llama.cpp; their ids are llama.cpp's.

    reason = refusal(gguf)               # None where the vocabulary is covered
    tokenizer = open_tokenizer(gguf)     # implements edgedec.tokenizer.Tokenizer

Covered are byte-level BPE ("gpt2") with the pre-tokenizers of `pretokenizers.py` and SentencePiece ("llama"). What is
not covered is refused, never approximated. The rules are those of llama.cpp as llama-cpp-python 0.3.36 has it, and
`benchmarks/tokenizer_parity.py` compares with it.
"""

from edgedec_runtimes.tokenizer.tokenizer import VocabularyTokenizer, open_tokenizer, refusal

__all__ = ["VocabularyTokenizer", "open_tokenizer", "refusal"]
