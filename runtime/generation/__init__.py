"""From messages to text: the model that users hold, chat, grammars, sampling, one answer as it comes."""
