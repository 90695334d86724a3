"""What llama-server has beyond the interface of OpenAI: /infill, /tokenize, /detokenize and fields of its own."""
