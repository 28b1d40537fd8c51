"""The coordinator of a run over several devices: plan, commands, activations, and recovery when a device is lost."""
