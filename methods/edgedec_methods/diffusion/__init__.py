"""Diffusion language models: one denoising loop (block_diffusion.py), and its rules, a file each."""
