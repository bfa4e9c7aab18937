"""Training runs: the setting, the workers, the loop, and the logs and checkpoints in a folder."""
