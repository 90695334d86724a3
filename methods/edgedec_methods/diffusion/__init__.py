"""Diffusion language models: one denoising loop (block_diffusion.py), and the rules by which it commits tokens, a file each."""
