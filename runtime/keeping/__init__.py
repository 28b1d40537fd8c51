"""Prompts and conversations that are kept on disk: what was computed once is read back, not computed again."""
