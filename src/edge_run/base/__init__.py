"""The ground floor: errors, units, configuration, protocols and result dataclasses. Imports nothing of ours."""
