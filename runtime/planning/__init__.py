"""What goes where under a budget, what that takes in time, and what earlier runs have found."""
