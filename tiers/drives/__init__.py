"""How files come from drives: directly, from two copies at once, and through the page cache."""
