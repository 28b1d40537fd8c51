"""How long passes will take: from the work in a graph, a measured device, and what earlier runs have found."""
