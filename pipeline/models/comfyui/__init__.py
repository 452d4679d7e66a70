"""Workflows of ComfyUI: read, and written as model files. Does not import torch."""
