"""A run over several devices: spread, spoken, and gone on with when one is lost."""
