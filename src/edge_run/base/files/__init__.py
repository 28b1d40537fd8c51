"""Files: what others wrote, what we write, which file is which, and where the user's folders are."""
