"""A model behind HTTP: the APIs of OpenAI, Anthropic, Ollama and llama-server, queued, bounded and guarded."""
