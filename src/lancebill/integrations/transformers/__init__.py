"""transformers models whose experts stay packed: load, save, serve, or swap the experts of a model in memory."""
