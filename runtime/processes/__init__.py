"""Child processes of ours, and the cell in which what strangers wrote runs."""
