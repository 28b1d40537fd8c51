"""How files come from drives: two copies at once, and through the page cache."""
