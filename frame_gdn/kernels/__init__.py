"""The lowest layer: the recurrences as loops, in plain PyTorch and on Triton, and the choice between them."""
