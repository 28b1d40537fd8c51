"""What to bring forward next: layer schedules, expert caches, predictors and route traces."""
