"""`make demo`: a real language model as a mixture of experts, quantised, speaking."""
