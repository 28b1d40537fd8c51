"""What a model file is, found out before it is trusted: its kind, its rules, and a trial in a child process."""
