"""transformers models with packed experts: loads, saves and serves them, or packs the experts of a model in memory."""
