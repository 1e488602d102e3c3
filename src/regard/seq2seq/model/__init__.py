"""The network: embeddings, encoder, attention, decoder, vocabulary; and its files."""
