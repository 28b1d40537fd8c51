"""What commands share: settings, options, the terminal, answers and their figures."""
