"""Imported first by what is written for diffusers' models: where diffusers is missing, the error names the extra."""

import importlib.util

if importlib.util.find_spec("diffusers") is None:
    raise ImportError(
        "frame_gdn's pipeline, decoder and hosts need diffusers: pip install 'frame-gdn[diffusers]'", name="diffusers"
    )
