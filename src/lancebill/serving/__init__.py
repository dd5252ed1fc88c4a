"""An OpenAI-compatible server for one transformers model: continuous batching in one thread, HTTP in another."""
