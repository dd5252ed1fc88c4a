"""`make demo`: a language model as a quantised mixture of experts."""
