"""What single commands write: tables in words, and pictures."""
