"""Stable Video Diffusion: StableVideoDiffusionPipeline of diffusers."""
