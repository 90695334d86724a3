"""Tokenizers built from a GGUF's own vocabulary, without llama.cpp.

    reason = refusal(gguf)               # None where the vocabulary is covered
    tokenizer = open_tokenizer(gguf)     # implements edgedec.tokenizer.Tokenizer

Covered are byte-level BPE ("gpt2") with the pre-tokenizers of `pretokenizers.py`, BPE over characters ("gemma4"),
SentencePiece ("llama") and WordPiece ("bert"). Other vocabularies are refused, never approximated. The rules are those
of llama.cpp in llama-cpp-python 0.3.36, whose ids were the same for 20,000 strings per model; WordPiece is BERT's own.
"""

from edgedec_runtimes.tokenizer.tokenizer import VocabularyTokenizer, open_tokenizer, refusal

__all__ = ["VocabularyTokenizer", "open_tokenizer", "refusal"]
