"""Networks cut between a device and a server: inspected, trained, served and run."""
