"""The llamacpp runtime: any GGUF that llama.cpp loads."""
