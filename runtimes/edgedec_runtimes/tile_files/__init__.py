"""Files of tiles that may take the place of a fetched model's GGUF: their form, the GGUF's bytes, records of files."""
