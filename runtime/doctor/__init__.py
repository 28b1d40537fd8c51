"""What is wrong with an installation, a device or a model file."""
