"""How well a model does: perplexity, exact match, and whether two models really differ."""
