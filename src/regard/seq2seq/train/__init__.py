"""Training: settings, batches, steps, validation, checkpoints and the run folder."""
