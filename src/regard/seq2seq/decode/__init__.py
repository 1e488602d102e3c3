"""Search: from a trained model and a batch of sentences to the best hypotheses."""
