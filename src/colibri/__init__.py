"""colibri: quantised Mixture-of-Experts layers for LLM inference."""
