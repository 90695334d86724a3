"""The llamacpp runtime: runs any GGUF that llama.cpp loads."""
