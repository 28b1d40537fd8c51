"""Grammars that say what a model may answer: their text, and the process in which they run."""
