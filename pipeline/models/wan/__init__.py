"""Wan, by diffusers' WanImageToVideoPipeline: 2.1 and 2.2, with one or two denoising experts."""
