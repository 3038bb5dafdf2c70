"""Models: load and save Hugging Face checkpoints, one decoder code for rollout and training, router capture and replay."""
