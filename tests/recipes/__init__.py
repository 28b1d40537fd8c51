"""How the tiny models are made: metadata and sizes of more than a hundred architectures."""
