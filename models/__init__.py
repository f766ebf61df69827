"""The video diffusion transformer that train.py trains and rollout.py runs."""

from .video_dit import VideoDiT, VideoDiTOutput

__all__ = ["VideoDiT", "VideoDiTOutput"]
