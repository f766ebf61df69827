"""What train.py is written from: video files to clips to latents, and the training objective."""
